"""One decoder for every dense family and every MoE target, written as plain single-device modules that know no mesh.

Parameters have the names of the converter's roles (upcycle/arch/spec.py) with the module's name inserted:
`layers.3.attention.q.weight`, `layers.3.ffn.router.weight`. The routed experts of a layer are stacked
(`layers.3.ffn.experts.up`, `.down`). Parameters may be wider than the computation: a module casts its parameters to its
input's dtype, so float32 masters train a bfloat16 model and get float32 gradients.

Shapes: B sequences, S tokens each, T = B * S; D hidden, H heads, G key/value heads, A head size; V vocabulary;
N experts, K chosen experts a token, R routed rows = T * K.

Other modules make a model parallel, cheaper or observable by setting attributes. They set only the attributes of this
table, which the classes declare for this purpose (tests/unit/training/test_seams.py):

| class | attribute | set by | purpose |
|---|---|---|---|
| Linear | product | transformer_engine | multiply with Transformer Engine, in FP8 if asked |
| Linear | matrix, pair | shard | use the rank's part of a divided weight, and of its adapters |
| Linear | low | lora | the scale of the adapters' product |
| Norm | gain | shard | sum the gain's gradient over ranks that have different heads |
| Norm | normed | shard | one norm over heads that are on several ranks |
| Norm | normed | transformer_engine | use its kernels |
| Norm | added | transformer_engine | use its kernels for a sum and its norm |
| Norm | region | recompute | recompute the norm in backward |
| Attention | attend | context | ring or Ulysses attention over shares of a sequence |
| Attention | attend | transformer_engine | use its attention |
| Attention | attend | engine | packed rows with cached keys and values; restored afterwards |
| FeedForward | region | recompute | recompute the whole FFN |
| FeedForward | neurons_region | recompute | recompute the activation and its product with up |
| Layer | region | recompute | recompute the attention half |
| Router | region | recompute | recompute the router |
| Router | low | lora | as in Linear |
| Experts | low | lora | as in Linear |
| Experts | backend | watch | measure the output of each expert; restored afterwards |
| Experts | weights | shard | the rank's experts, and narrow copies that last for a step |
| MoE | dispatcher | shard | experts on several ranks |
| MoE | region | recompute | recompute dispatch, experts and combine |
| MoE | region | shard | keep dispatch, experts and combine out of torch.compile |
| MoE | balance | balance | losses, capacity, statistics |
| MoE | balance | bench | balanced routing |
| MoE | balance | watch | counts of choices; restored afterwards |
| MoE | balance | choices | the choices for a text that is typed; restored afterwards |
| MoE | balance | engine | None, to switch balancing off; restored afterwards |
| Decoder | last | teacher | return hidden states for distillation instead of logits |
| Decoder | embed, final_norm, head | parts | modules of several pipeline stages, in one decoder |
"""
