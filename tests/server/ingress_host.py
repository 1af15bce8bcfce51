"""Ray on this machine with replicas of models, and an ingress for each line that this program reads: JSON with the
models and settings of a server. It answers each with a line, `ready URL`."""

from __future__ import annotations

import json
import sys
import threading

from ray import serve

from asr_serve.cluster import application, cluster_config, control

CPUS = 2
WAIT_S = 180.0


def main() -> None:
    models = json.loads(sys.argv[1])
    control.start_ray(None, CPUS)
    try:
        config = cluster_config.from_mapping(models, "models")
        described = control.deploy(config, threading.Event(), local=True, wait_s=WAIT_S)
        print("ready", described["url"], flush=True)
        for number, line in enumerate(sys.stdin):
            config = cluster_config.from_mapping(json.loads(line), "settings")
            handles = {
                each.model: serve.get_deployment_handle(each.model, application.APPLICATION) for each in config.models
            }
            made = application.ingress(config, "machine", application.cluster_key(), handles)
            name = f"ingress-{number}"
            handle = serve.run(made, name=name, route_prefix=None, external_scaler_enabled=True)
            print("ready", handle.describe.remote().result(timeout_s=WAIT_S)["url"], flush=True)
    finally:
        control.shut_down()


if __name__ == "__main__":
    main()
