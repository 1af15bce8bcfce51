"""A server over many machines: Ray Serve deployments of an ingress and of each model's engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["app", "require_ray"]


def require_ray() -> None:
    """Raises ProgramMissing where Ray is not installed."""
    from asr_serve.errors import ProgramMissing

    try:
        import ray.serve  # noqa: F401
    except ImportError as missing:
        raise ProgramMissing(
            f"a cluster needs Ray, and the package {str(missing.name).partition('.')[0]} is not installed",
            todo="pip install 'asr-serve[cluster]'",
        ) from None


def app(args: dict[str, Any]) -> Application:
    """Application builder of `serve run asr_serve.cluster:app` and of KubeRay's RayService. `args`: `config`, the path
    of a cluster file; or the settings of one. Raises OptionError, ProgramMissing."""
    require_ray()
    from asr_serve.cluster import cluster_config
    from asr_serve.cluster.application import build

    if set(args) == {"config"}:
        return build(cluster_config.read(args["config"]))
    return build(cluster_config.from_mapping(args, "arguments of the application"))
