"""An FFN whose token slices live on different ranks: All-to-All, two batched GEMMs, All-to-All.

Four schedules of one computation: `none` (one after the other), `with-sm` (chunks by NCCL),
`sm-free` (chunks by copy engine), `kernel` (whatever A2A_FFN_KERNEL_PLUGIN names). B, T, D, k, L, H
and P mean what layout.py says.
"""
