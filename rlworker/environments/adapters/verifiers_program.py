"""Run tasks of a taskset of ``verifiers`` 0.4 as lines of JSON ask for it; ``verifiers.py`` starts this by its path."""

import asyncio
import json
import os
import sys
from typing import Any


def make_command(python: str, settings: dict[str, Any], tasksets: str = "") -> tuple[str, ...]:
    """Make the command of this program; with the further word ``rows`` it writes the rows of the taskset."""
    return python, "-P", __file__, json.dumps(settings), tasksets  # -P, or the files beside it would hide packages


async def serve(settings: dict[str, Any], output: Any) -> None:
    """Play what standard input asks for, side by side, until it is closed."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  in another Python

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


def write_rows(settings: dict[str, Any], output: Any) -> None:
    """Write the rows of a taskset, a line of JSON for each task."""
    import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]  in another Python

    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(**settings))
    for number, task in enumerate(env.taskset):
        print(json.dumps({"prompt": str(task.data.prompt), "answer": "", "index": number}), file=output)


if __name__ == "__main__":
    output, sys.stdout = sys.stdout, sys.stderr  # what a taskset prints is no answer
    settings, tasksets, *words = sys.argv[1:]
    # Harnesses are started by uv, which lies beside this Python; they and servers of tools import the taskset, too.
    for name, folder in (("PATH", os.path.dirname(sys.executable)), ("PYTHONPATH", tasksets)):
        os.environ[name] = os.pathsep.join(filter(None, (folder, os.environ.get(name))))
    sys.path += filter(None, [tasksets])
    if words == ["rows"]:
        write_rows(json.loads(settings), output)
    else:
        asyncio.run(serve(json.loads(settings), output))
