"""schemathesis makes up requests from the endpoint's own OpenAPI document: none is answered by a fault of the server.

It is a program of its own, in no list of pins: ``pipx install schemathesis``.
"""

import asyncio
import shutil
from dataclasses import replace

import pytest
from support.environments.agents import ASK, PATIENT, play

PROGRAM = shutil.which("schemathesis")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
CHECKS += ",negative_data_rejection,unsupported_method"


@pytest.mark.large
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PROGRAM, reason="schemathesis is not installed")
def test_no_request_is_a_fault_of_the_server(tmp_path):
    heard = []

    async def agent(client, endpoint):
        assert PROGRAM
        url = endpoint.base_url
        options = ["--max-examples", "200", "--checks", CHECKS, "--no-color", "--seed", "1"]
        process = await asyncio.create_subprocess_exec(
            *(PROGRAM, "run", f"{url}/openapi.json", "--url", url, *options),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        heard.append((process.returncode, output.decode()))
        await client.chat.completions.create(model="", messages=[ASK])

    limits = replace(PATIENT, turns=10**5, tokens=10**5, time_limit_s=500.0)
    (record,) = play(agent, limits=limits)
    ((code, output),) = heard
    assert code == 0 and "3 passed" in output, output
    assert record.failure is None and record.turns > 50, "the episode went on, by what was well formed"
