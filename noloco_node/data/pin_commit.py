"""The commit of a hub's data set that a run reads, where its author names none: the newest one when the run is made.

Without one, two volunteers could train on different versions of the data set, and a checkpoint's position would be lost
when it changes. A run that was started from the same run.toml before keeps its commit, so a restart continues the same
run, also without the network. Imports no torch.
"""

from noloco_node.base.validation import in_one_line
from noloco_node.errors import NolocoError, UsageError
from noloco_node.host.home import Home
from noloco_node.run import signed_file
from noloco_node.run.manifest import verify
from noloco_node.run.schema import DataSpec, Manifest

_TIMEOUT_S = 20.0


def pinned(run: Manifest, home: Home) -> Manifest:
    """The same run with a commit. Raises NolocoError where the hub cannot be asked."""
    return without_asking(run, home) or _with(run, _present_commit(str(run.data.dataset)))


def without_asking(run: Manifest, home: Home) -> Manifest | None:
    """The same, where the run names its commit or was started here before."""
    if run.data.source != "hub" or run.data.revision is not None:
        return run
    folders = sorted(home.root.glob(f"runs/*/{signed_file.NAME}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in folders:
        try:
            earlier = verify(signed_file.read(path.parent).signed)  # as it was signed, without amendments
        except UsageError:  # a damaged one is named when that run is started
            continue
        if _with(earlier, None).canonical() == run.canonical():
            return earlier
    return None


def _with(run: Manifest, revision: str | None) -> Manifest:
    return run.model_copy(update={"data": run.data.model_copy(update={"revision": revision})})


def _present_commit(name: str) -> str:
    """Calls the hub's library, which documents no exceptions: each becomes NolocoError."""
    try:
        from huggingface_hub import HfApi

        commit = HfApi().dataset_info(name, timeout=_TIMEOUT_S).sha
        return str(DataSpec(source="hub", dataset=name, revision=commit).revision)
    except Exception as error:
        why = in_one_line(error)
        raise NolocoError(
            f"cannot look up the present commit of the data set {name}: {why}. Is this machine online? Else write its "
            'commit into run.toml, under [data]: revision = "<40 hexadecimal digits>"'
        ) from error
