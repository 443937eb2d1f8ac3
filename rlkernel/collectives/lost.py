"""A rank that dies inside a reduction: between its agreement and its bytes, its peers waiting."""

from __future__ import annotations

import os
import signal

from torch import Tensor

from rlkernel.collectives.comm import Call, Proceed


class DiesInside:
    """An observer: `rank` ends by SIGKILL at `site`, once its group has agreed to add."""

    def __init__(self, rank: int, site: str) -> None:
        self.rank, self.site = rank, site

    def __call__(self, call: Call, x: Tensor, proceed: Proceed) -> Tensor:
        if call.site == self.site and call.comm.rank == self.rank:
            agree = call.link.agreement.check

            def agree_and_die(site: str, signature: str) -> None:
                agree(site, signature)
                os.kill(os.getpid(), signal.SIGKILL)

            call.link.agreement.check = agree_and_die
        return proceed(x)
