"""Ray on this machine with replicas of models, and an ingress for each line that this program reads.

A line is JSON with its name and the settings of a server. The answer is a line: `ready URL`, or `failed` and why.
`{"end": NAME}` ends one.
"""

from __future__ import annotations

import json
import sys
import threading

from ray import serve
from ray.exceptions import RayError

from asr_serve.cluster import application, cluster_config, control

CPUS = 2
WAIT_S = 500.0


def main() -> None:
    models = json.loads(sys.argv[1])
    control.start_ray(None, CPUS)
    try:
        config = cluster_config.from_mapping(models, "models")
        described = control.deploy(config, threading.Event(), local=True, wait_s=WAIT_S)
        print("ready", described["url"], flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            if "end" in request:
                serve.delete(request["end"], _blocking=False)
                continue
            config = cluster_config.from_mapping(request["settings"], "settings")
            names = [each.model for each in config.models]
            handles = {name: serve.get_deployment_handle(name, application.APPLICATION) for name in names}
            made = application.ingress(config, "machine", application.cluster_key(), handles)
            try:
                handle = serve.run(made, name=request["start"], route_prefix=None, external_scaler_enabled=True)
                print("ready", handle.describe.remote().result(timeout_s=WAIT_S)["url"], flush=True)
            except (RuntimeError, RayError, TimeoutError) as error:  # the others go on
                serve.delete(request["start"], _blocking=False)
                print("failed", json.dumps(str(error)), flush=True)
    finally:
        control.shut_down()


if __name__ == "__main__":
    main()
