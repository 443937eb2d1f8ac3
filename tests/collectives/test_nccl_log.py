"""NCCL's debug log, as versions 2.27 and 2.28 write it: which group used what."""

from __future__ import annotations

from rlkernel.collectives import nccl_log

HEAD = "box:{pid}:{pid} [0] NCCL INFO "
TP = "0xab12"
CP = "0xcd34"


def log(rank: int, proto: str = "LL") -> str:
    """Rank's own log: its TP communicator over peer memory, its CP one over the network."""
    tp, cp, at = f"0x55{rank}0", f"0x55{rank}8", {"pid": 100 + rank}
    lines = [
        "NCCL version 2.28.9+cuda13.0",
        f"ncclCommInitRankConfig comm {tp} rank {rank % 2} nranks 2 cudaDev 0 nvmlDev 0 busId 1b0 "
        f"commId {TP}{rank // 2} - Init START",
        f"ncclCommInitRankConfig comm {tp} rank {rank % 2} nranks 2 cudaDev 0 nvmlDev 0 busId 1b0 "
        f"commId {TP}{rank // 2} - Init COMPLETE",
        f"AllReduce: opCount 0 sendbuff 0x7f recvbuff 0x7f count 1024 datatype 9 op 0 root 0 comm "
        f"{tp} [nranks=2] stream 0x66 task 0 globalrank {rank}",
        f"Channel 00/0 : {rank % 2}[0] -> {1 - rank % 2}[1] via P2P/CUMEM/read",
        f"ncclCommInitRankConfig comm {cp} rank {rank // 2} nranks 2 cudaDev 0 nvmlDev 0 busId 1b0 "
        f"commId {CP}{rank % 2} - Init COMPLETE",
        f"AllReduce: opCount 0 sendbuff 0x7f recvbuff 0x7f count 1024 datatype 9 op 0 root 0 comm "
        f"{cp} [nranks=2] stream 0x66 task 0 globalrank {rank}",
        "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0",
        "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0/Shared",
    ]
    if rank < 2:  # only a communicator's rank 0 tells what was chosen
        lines.append(f"AllReduce: 2048 Bytes -> Algo RING proto {proto} channel{{Lo..Hi}}={{0..0}}")
    if rank % 2 == 0:
        lines.append(f"AllReduce: opCount 1 sendbuff 0x7f comm {tp} [nranks=2] stream 0x66")
        lines.append("AllReduce: 2048 Bytes -> Algo TREE proto SIMPLE channel{Lo..Hi}={0..3}")
    return "\n".join(HEAD.format(**at) + line for line in lines)


def test_every_group_tells_its_transport_and_choice():
    said = [nccl_log.parse(log(rank)) for rank in range(4)]
    assert {one["version"] for one in said} == {"2.28.9+cuda13.0"}
    found = {tuple(group["ranks"]): group for group in nccl_log.groups(said)}
    assert set(found) == {(0, 1), (2, 3), (0, 2), (1, 3)}
    for ranks in ((0, 1), (2, 3)):
        assert found[ranks]["transports"] == ["P2P/CUMEM/read"]
        assert found[ranks]["choices"] == ["ALLREDUCE 2048 B: TREE/SIMPLE"]
    for ranks in ((0, 2), (1, 3)):
        assert found[ranks]["transports"] == ["NET/Socket", "NET/Socket/Shared"]
        assert found[ranks]["choices"] == ["ALLREDUCE 2048 B: RING/LL"]


def test_an_address_that_is_used_again_is_another_communicator():
    twice = log(0) + "\n" + log(0, "LL128").replace(TP, "0xef").replace(CP, "0x99")
    stories = nccl_log.parse(twice)["stories"]
    assert len({story["comm_id"] for story in stories}) == len(stories) == 4
    by_id = {story["comm_id"]: story["choices"] for story in stories}
    assert by_id[f"{CP}0"] == ["ALLREDUCE 2048 B: RING/LL"]
    assert by_id["0x990"] == ["ALLREDUCE 2048 B: RING/LL128"]


def test_a_log_that_is_not_there_tells_nothing(tmp_path):
    assert nccl_log.read(tmp_path / "none") == {"version": None, "stories": []}
    assert nccl_log.groups([nccl_log.read(tmp_path / "none")] * 4) == []
    (tmp_path / "log").write_text("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n")
    assert nccl_log.read(tmp_path / "log")["stories"] == []
