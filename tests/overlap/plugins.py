"""Plugins that A2A_FFN_KERNEL_PLUGIN may name: one that works by itself and several that do not."""

import sys
import types

import torch
from torch.nn import functional

from rlkernel.overlap import path


def _module(name, forward_ffn=None):
    module = types.ModuleType(f"{__name__}.{name}")
    if forward_ffn:
        module.forward_ffn = forward_ffn
    sys.modules[module.__name__] = module
    return module.__name__


def _delegate(overlap):
    def forward_ffn(ffn, inputs, *, comp_only=False):
        return ffn.forward(inputs, overlap=overlap, comp_only=comp_only)

    return forward_ffn


def _noting(rung, forward_ffn):
    def noted(ffn, inputs, *, comp_only=False):
        path.note(rung, "own", "one by one")
        return forward_ffn(ffn, inputs)

    return noted


def _own(ffn, inputs, *, comp_only=False):
    """A lone rank's layer, written out; it says nothing of how it ran."""
    z = (inputs.transpose(0, 1) @ ffn.w1).transpose(0, 1) + ffn.b1
    u, g = z.chunk(2, -1)
    h = ffn.norm_x(u) * functional.silu(ffn.norm_gate(g))
    return torch.bmm(h.transpose(0, 1), ffn.wout).transpose(0, 1) + ffn.bout


STARTER = _module("starter", _delegate("none"))
RELABELLED = _module("relabelled", _delegate("with-sm"))
WRONG = _module("wrong", _noting("chunks", lambda ffn, inputs: _own(ffn, inputs) + 1))
NARROW = _module("narrow", _noting("chunks", lambda ffn, inputs: _own(ffn, inputs)[:1]))
OWN = _module("own", _noting("chunks", _own))
STRANGE = _module("strange", _noting("superb", _own))
SILENT = _module("silent", _own)
EMPTY = _module("empty")
