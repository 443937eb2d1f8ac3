"""Real processes: launch them, wait for them, clean up behind them, write down what happened.

    launch.measure()      in the caller's process, torch-free; owns run.json
        agent             one child: torchrun, tied to the launcher's life
            worker        one process a rank, tied to the agent's life; rank 0 appends the rows

Whoever of the three dies, the ones below end too, and the record says what happened.
"""
