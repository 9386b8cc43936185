"""One decoder for every dense family and every MoE target, as plain single-device modules that know no mesh.

Parameters are named by the converter's roles (upcycle/arch/spec.py), with the module in between:
`layers.3.attention.q.weight`, `layers.3.ffn.router.weight`. The routed experts of a layer are stacked
(`layers.3.ffn.experts.up`, `.down`). Parameters may be wider than the computation: a module casts them to its input's
dtype, so float32 masters train a bfloat16 model and get float32 gradients.

Shapes: B sequences, S tokens each, T = B * S; D hidden, H heads, G key/value heads, A head size; V vocabulary;
N experts, K chosen ones, R routed rows = T * K.

What makes a model parallel, cheaper or watched is put into it from outside, in attributes that are declared for that,
and in no others (tests/unit/training/test_seams.py):

| class | attribute | by | what for |
|---|---|---|---|
| Linear | product | transformer_engine | its products, in FP8 if asked |
| Linear | matrix, pair | shard | a rank's part of a divided weight, and of its adapters |
| Linear | low | lora | what its adapters are multiplied with |
| Norm | gain | shard | a gain whose gradient is summed over the ranks that have other heads |
| Norm | normed | shard | one norm over heads that are on several ranks |
| Norm | normed | transformer_engine | its kernels |
| Norm | added | transformer_engine | the same for a sum and its norm |
| Norm | region | recompute | computed once more in backward |
| Attention | attend | context | ring or Ulysses over shares of a sequence |
| Attention | attend | transformer_engine | its attention |
| Attention | attend | engine | packed rows, remembered keys and values; put back afterwards |
| FeedForward | region | recompute | all of it computed once more |
| FeedForward | neurons_region | recompute | activation and product computed once more |
| Layer | region | recompute | the half that attends computed once more |
| Router | region | recompute | computed once more |
| Router | low | lora | as of Linear |
| Experts | low | lora | as of Linear |
| Experts | backend | watch | what each expert says, measured; put back afterwards |
| Experts | weights | shard | a rank's experts, and narrow copies that last for a step |
| MoE | dispatcher | shard | experts on several ranks |
| MoE | region | recompute | dispatch, experts and combine once more |
| MoE | region | shard | dispatch, experts and combine outside of what is compiled |
| MoE | balance | balance | losses, capacity, statistics |
| MoE | balance | bench | balanced routing |
| MoE | balance | watch | counts of choices; put back afterwards |
| MoE | balance | engine | None, for no balance; put back afterwards |
| Decoder | last | teacher | hidden states for the lesson instead of logits |
| Decoder | embed, final_norm, head | parts | modules of several pipeline stages, in one decoder |
"""
