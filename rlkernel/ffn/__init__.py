"""The Qwen3 FFN whose bits are fixed by a contract: operators (ops.py), and the layer on them."""

from rlkernel.ffn.ops import det_gemm_da, det_gemm_db, det_gemm_fwd, gate_up, swiglu_backward

__all__ = ["det_gemm_da", "det_gemm_db", "det_gemm_fwd", "gate_up", "swiglu_backward"]
