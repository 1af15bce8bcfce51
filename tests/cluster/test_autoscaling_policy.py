"""The policy as Ray Serve calls it: copied to another process, with reports and a state of Ray Serve's own."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray", reason="no Ray here: pip install 'asr-serve[cluster]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray Serve's own, when it is imported

IDLE = {"occupancy": 0.0, "queue_s": 0.0, "sessions": 0.0, "backlog_s": 0.0, "ingress_queue": 0.0}


class Controller:
    """What Ray Serve's controller does with the policy of a deployment."""

    def __init__(self, **autoscale: Any) -> None:
        from ray import cloudpickle
        from ray.serve._private.autoscaling_state import _resolve_policy_callable
        from ray.serve.autoscaling_policy import _apply_autoscaling_config

        from asr_serve.cluster.application import replica_options
        from asr_serve.cluster.cluster_config import from_mapping

        (model,) = from_mapping({"models": [{"model": "a", "autoscale": autoscale}]}, "the test").models
        self.options = replica_options(model)
        self.config = cloudpickle.loads(cloudpickle.dumps(self.options["autoscaling_config"]))
        self.policy = _apply_autoscaling_config(_resolve_policy_callable(self.config.policy))
        self.state: dict[str, Any] = {}
        self.now_s, self.target = 2_000.0, self.config.min_replicas

    def tick(self, age_s: float = 1.0, **signals: float) -> int:
        from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
        from ray.serve.config import AutoscalingContext

        self.now_s += 1
        deployment = DeploymentID("a", "asr-serve")
        replicas = [ReplicaID(str(number), deployment) for number in range(self.target)]
        before = TimeStampedValue(self.now_s - age_s - 5, 99.0)
        series = {
            name: {each: [before, TimeStampedValue(self.now_s - age_s, value)] for each in replicas}
            for name, value in (IDLE | signals).items()
        }
        context = AutoscalingContext(
            deployment_id=deployment,
            deployment_name="a",
            app_name="asr-serve",
            current_num_replicas=self.target,
            target_num_replicas=self.target,
            running_replicas=replicas,
            total_num_requests=7.0,  # calls that are attached: no load
            total_queued_requests=0.0,
            aggregated_metrics={},
            raw_metrics=lambda: series,
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas,
            policy_state=self.state.copy(),
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=self.now_s,
            config=self.config,
        )
        self.target, self.state = self.policy(context)
        return int(self.target)


def test_the_policy_scales_out_and_in_with_the_state_that_ray_serve_keeps():
    controller = Controller(min_replicas=2, max_replicas=4, out_after_s=2, cool_down_s=5, in_after_s=4)
    assert controller.target == 2
    assert [controller.tick(queue_s=3.0) for _ in range(9)] == [2, 2, 3, 3, 3, 3, 3, 4, 4]
    assert [controller.tick() for _ in range(10)] == [4, 4, 4, 4, 3, 3, 3, 3, 3, 2]
    assert controller.tick() == 2


def test_the_last_report_counts_while_it_is_fresh():
    controller = Controller(max_replicas=4, out_after_s=0, stale_s=10)
    assert controller.tick() == 1
    assert controller.tick(age_s=11.0, queue_s=3.0) == 1
    assert controller.tick(queue_s=3.0) == 2


def test_reports_come_as_often_as_the_file_says_and_ray_serve_delays_nothing():
    controller = Controller(max_replicas=4, report_s=2.5)
    config = controller.config
    assert config.metrics_interval_s == 2.5
    assert config.look_back_period_s > config.metrics_interval_s
    assert (config.upscale_delay_s, config.downscale_delay_s, config.initial_replicas) == (0, 0, None)
    assert "num_replicas" not in controller.options


def test_a_policy_of_encoders_waits_for_no_ingress():
    from asr_serve.cluster.application import replica_options
    from asr_serve.cluster.autoscaling import AutoscaleSettings
    from asr_serve.cluster.cluster_config import ModelDeployment

    for role, connected in (("encode", False), ("decode", True), (None, True)):
        model = ModelDeployment(model="a", role=role, autoscale=AutoscaleSettings(max_replicas=2))
        assert replica_options(model)["autoscaling_config"].policy.policy_kwargs["has_ingress"] is connected


def test_a_load_has_no_value_for_what_is_not_measured():
    import asyncio

    from asr_serve.cluster.engine_replica import EngineReplica
    from asr_serve.engine.process.messages import EngineLoad, EngineReport

    class Engine:
        def __init__(self, report: EngineReport | None) -> None:
            self.answer = report

        def report(self) -> EngineReport | None:
            return self.answer

        def close(self) -> None:
            pass

    replica = EngineReplica.__new__(EngineReplica)
    replica._folder = ""
    for report, expected in (
        (EngineReport(1, {}, b"", EngineLoad(occupancy=0.5, queue_s=0.0)), {"occupancy": 0.5, "queue_s": 0.0}),
        (None, {}),
    ):
        replica._backend = Engine(report)  # type: ignore[assignment]
        assert asyncio.run(replica.record_autoscaling_stats()) == expected
