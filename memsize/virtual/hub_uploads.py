"""Uploads to the Hub, which a simulated run does not make: trainers create a repository before their first step.

Source: huggingface_hub 0.36 and 2.4, `hf_api.HfApi`; transformers 4.52 and 5.23, `Trainer.init_hf_repo`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from memsize.processes.patches import LatePatches, Patch

_NOTE: Final = "nothing is uploaded: {} was neither created nor changed"


def later(note: Callable[[str], None]) -> dict[str, LatePatches]:
    """Return the patches of what creates a repository or commits to it, by module; `note` takes a sentence."""

    def create_repo(repo_id: str, **_: Any) -> Any:
        from huggingface_hub import RepoUrl

        note(_NOTE.format(repo_id))
        return RepoUrl(f"https://huggingface.co/{repo_id if '/' in repo_id else f'user/{repo_id}'}")

    def create_commit(repo_id: str, operations: Any = (), *, commit_message: str = "", **_: Any) -> Any:
        from huggingface_hub import CommitInfo

        url = f"{create_repo(repo_id)}/commit/{'0' * 40}"
        return CommitInfo(commit_url=url, commit_message=commit_message, commit_description="", oid="0" * 40)

    def of_hub(module: Any) -> Iterator[Patch]:
        yield module.HfApi, "create_repo", lambda _, repo_id, **options: create_repo(repo_id, **options)
        yield (
            module.HfApi,
            "create_commit",
            lambda _, repo_id, *args, **options: create_commit(repo_id, *args, **options),
        )

    def of_trainer(module: Any) -> Iterator[Patch]:
        if hasattr(module, "create_repo"):  # before release 5, which asks an HfApi
            yield module, "create_repo", create_repo

    return {"huggingface_hub.hf_api": of_hub, "transformers.trainer": of_trainer}
