"""Run tasks of a taskset of ``verifiers`` 0.4 as lines of JSON ask for it; ``verifiers.py`` starts this by its path."""

import asyncio
import json
import sys
from typing import Any


async def serve(settings: dict[str, Any]) -> None:
    """Play what standard input asks for, side by side, until it is closed."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  in another Python

    output, sys.stdout = sys.stdout, sys.stderr  # what a taskset prints is no answer
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(**settings))
    tasks, running = [*env.taskset], set()

    async def play(asked: dict[str, Any]) -> None:
        client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var="NONE")
        try:
            episode = await env.run_episode(tasks[asked["index"]], vf.ModelContext(model="policy", client=client))
            error = "; ".join(error.message for part in (episode, *episode.traces) for error in part.errors)
            reward = sum(trace.reward for trace in episode.traces)
        except Exception as raised:
            error, reward = f"{type(raised).__name__}: {raised}", 0.0
        print(json.dumps({"number": asked["number"], "error": error, "reward": reward}), file=output, flush=True)

    async with env.serving():
        while line := await asyncio.to_thread(sys.stdin.readline):
            running.add(task := asyncio.create_task(play(json.loads(line))))
            task.add_done_callback(running.discard)


def write_rows(settings: dict[str, Any]) -> None:
    """Write the rows of a taskset to standard output, a line of JSON for each task."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  in another Python

    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(**settings))
    for number, task in enumerate(env.taskset):
        print(json.dumps({"prompt": str(task.data.prompt), "answer": "", "index": number}))


if __name__ == "__main__":
    if sys.argv[2:] == ["rows"]:
        write_rows(json.loads(sys.argv[1]))
    else:
        asyncio.run(serve(json.loads(sys.argv[1])))
