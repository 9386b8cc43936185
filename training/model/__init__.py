"""One decoder for every dense family and every MoE target, as plain single-device modules that know no mesh.

Parameters are named by the converter's roles (upcycle/spec.py), with the module in between:
`layers.3.attention.q.weight`, `layers.3.ffn.router.weight`. The routed experts of a layer are stacked
(`layers.3.ffn.experts.up`, `.down`). Parameters may be wider than the computation: a module casts them to its input's
dtype, so float32 masters train a bfloat16 model and get float32 gradients.

Shapes: B sequences, S tokens each, T = B * S; D hidden, H heads, G key/value heads, A head size; V vocabulary;
N experts, K chosen ones, R routed rows = T * K.
"""
