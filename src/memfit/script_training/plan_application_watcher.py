"""What becomes of a plan while a script trains under it.

The watcher says it, and ends the script if it would train without the plan:

known from the file              before the script starts
known when a model is planned    when its optimizer is created
known from the first forward     before the first step of an optimizer
no model has got the plan        before the first step of an optimizer
known only at the end            the exit code is not 0
"""

import atexit
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from memfit.errors import TargetError, UsageError
from memfit.injection.injection_files import InjectionReport
from memfit.planning.plan_file import PlanFile
from memfit.records import Change
from memfit.records.command_as_typed import command_as_typed
from memfit.records.own_sharding import call_options_in_words
from memfit.report.escape_control_characters import escaped
from memfit.trials.trial_run import recomputed_saved_ops_in_words
from memfit.user_lines import line_of_error

CONF = "PYTORCH_ALLOC_CONF"
FLAG = "--as-far-as-it-goes"
_NO_MODEL = "NOT APPLIED: no optimizer of this process has taken the parameters of a model."


class PlanApplicationWatcher:
    """What becomes of a plan. The first rank says it, if there are several; all are ended.

    Args:
        file: the plan's.
        plan: the plan.
        command: the script's ``sys.argv``.
        as_far_as_it_goes: whether the script trains even if a part of the plan is not applied.
    """

    def __init__(
        self,
        file: str,
        plan: PlanFile,
        command: tuple[str, ...],
        *,
        as_far_as_it_goes: bool,
    ) -> None:
        self._file, self._plan = file, plan
        self._ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.carried_out = automatic_part_of_change(plan.change, self._ranks)
        """What of the plan needs no change of the script."""
        self.left_out = changes_left_to_user(plan.change)
        """What does, and how to carry it out."""
        self._command = command
        self._as_far = as_far_as_it_goes
        self._said: dict[str, None] = {}
        self._last = InjectionReport()
        self._has_stepped = self._has_stopped = False

    def begin(self, versions: Mapping[str, str]) -> None:
        """Say for what else the plan was made, what will be applied and what not.

        Raises:
            SystemExit: a part of it takes a change of the script.
        """
        if self._as_far:
            atexit.register(self._repeat)  # below what the watch says: it registers later
        for other in _made_for_others(self._plan, self._command, versions, self._ranks):
            self._say(f"{self._file} was made {other}")
        for part in self.left_out:
            self._say(f"NOT APPLIED, as it takes a change of the script: {part}")
        if self.left_out and not self._as_far:
            self._stop(f"before the script started. Write that in the script, and then train it with {FLAG}")
        if self._plan.is_sharded and self._ranks == 1:
            self._say("NOT APPLIED: sharding takes a process for each GPU, and this is the only one")
            if not self._as_far:
                again = f"-m memfit train --plan {self._file} {shlex.join(command_as_typed(self._command))}"
                ranks = self._plan.world_size if self._plan.world_size > 1 else "N"
                self._stop(f"before the script started. Write torchrun --nproc-per-node {ranks} {again}")
        what = [*self.carried_out.plan, *["fused optimizers"] * self.carried_out.fused]
        what += map(call_options_in_words, self.carried_out.own_sharding.values())
        what += [f"{CONF}={self.carried_out.allocator}"] * bool(self.carried_out.allocator)
        what += [" ".join(self.carried_out.arguments)] * bool(self.carried_out.arguments)
        self._say(f"training under {self._file}: {', '.join(what) or 'nothing to apply'}")
        if "sharding" in self.carried_out.plan:
            shared = self.carried_out.plan["sharding"].get("split_batch") is not False
            batches = "share each batch" if shared else "have batches of the script's size, each its own"
            self._say(f"{self._ranks} ranks {batches}; rank 0 alone prints, and writes the script's files")

    def report(self, report: InjectionReport) -> None:
        """Say what has changed: a model has got the plan, or was refused it.

        Raises:
            SystemExit: the model was refused the plan that was made for it, or is another.
        """
        self._last = report
        for model in report.models:
            if self._plan.made_for(model):
                self._say(f"applied to {model}")
            elif self._as_far or self._has_stepped:
                self._say(f"applied to {model}; it was made for {', '.join(self._plan.models)}")
            else:
                self._miss(f"NOT APPLIED to {model}: it was made for {', '.join(self._plan.models)}")
        for note in report.notes:
            self._say(note)
        if report.operations is not None and (
            report.operations.recomputed or "checkpointing" in self.carried_out.plan
        ):
            planned = self._plan.operations
            same = planned is not None and report.operations.recomputes_as(planned)
            self._say(f"recomputed {report.operations}{', as planned' * same}")
        if report.missing:
            self._miss(
                "NOT APPLIED in full: the model does not run these operations, whose results the plan keeps: "
                f"{', '.join(report.missing)}"
            )
        if report.again:
            self._say(f"NOT AS PLANNED: {recomputed_saved_ops_in_words(report.again)}")
        self._say_refusals(report)

    def _say_refusals(self, report: InjectionReport) -> None:
        if report.caught:
            self._refused(*report.caught, goes_on=self._as_far)
        for why, model in report.refusals:
            if not model or self._plan.made_for(model):
                self._miss(f"NOT APPLIED{f' to {model}' if model else ''}: {why}")
            else:  # so it was when the plan was made
                self._say(f"{model} trains as written: {why}")

    def watch_steps(self) -> None:
        """Have the first step of an optimizer wait for ``expect_applied``: torch has been imported."""
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        def before_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._has_stepped:
                return None
            self.expect_applied()
            closure = args[1] if args[1:] else kwargs.get("closure")
            if closure is None:
                return None

            def checked() -> Any:  # the model may be called in there alone
                loss = closure()
                self.expect_applied()
                return loss

            return (args[:1], {**kwargs, "closure": checked})

        def after_step(*_: Any) -> None:
            self._has_stepped = True

        register_optimizer_step_pre_hook(before_step)
        register_optimizer_step_post_hook(after_step)  # a step's closure runs the model inside

    def expect_applied(self) -> None:
        """Check that the plan has been applied: an optimizer is about to make the first step.

        Raises:
            SystemExit: it has not, and the script is to train under all of it.
        """
        if not self._as_far:
            self._say_missing()

    def refused(self, error: UsageError) -> None:
        """Say why the script has failed: the plan does not suit what it does.

        Raises:
            SystemExit: always, but where it may train without a part of the plan, and has not begun to.
        """
        self._refused(str(error), line_of_error(error))

    def _refused(self, why: str, line: str, *, goes_on: bool = False) -> None:
        at = f" at {line}" if line else ""
        if self._has_stepped and not goes_on:
            reason = "" if any(why in each for each in self._said) else f": {why.removesuffix('.')}"
            self._stop(f"during training{at}{reason}")
        self._miss(f"NOT APPLIED{at}: {why}")

    def end(self) -> bool:
        """Say what was not applied in the end, and return whether the script may end well."""
        trained, self._has_stepped = self._has_stepped, True
        if not self._has_stopped:
            self._say_missing()
            if self.carried_out.plan and not trained and not self._missing():
                self._say("NOT APPLIED: no optimizer has made a step")
        missing = self._missing()
        return not missing or (self._as_far and _NO_MODEL not in missing)

    def _repeat(self) -> None:
        if missing := self._missing():
            self._say(f"trained without a part of {self._file}: {' '.join(missing)}")

    def _missing(self) -> list[str]:
        return [text for text in self._said if text.startswith("NOT APPLIED")]

    def _say_missing(self) -> None:
        if not self.carried_out.plan:
            return
        if self._last.unfit_optimizer:
            self._miss(f"NOT APPLIED: {self._last.unfit_optimizer}")
        if self._last.models:
            for name, why in self._last.why_uncalled():
                self._miss(f"NOT APPLIED to {name}: {why}")
            return
        for why, model in self._last.refusals:
            if model and not self._plan.made_for(model):
                self._miss(f"NOT APPLIED to {model}: {why} It was made for {', '.join(self._plan.models)}.")
        if not self._last.refusals:
            self._miss(_NO_MODEL)

    def _miss(self, text: str) -> None:
        """Say that a part of the plan was not applied, and end the script if it has not trained.

        Raises:
            SystemExit: it has not.
        """
        self._say(text)
        if not self._as_far and not self._has_stepped:
            advice = f"Leave that out of {self._file}"  # which the user wrote
            if self._plan.command:
                again = shlex.join(("memfit", "plan", "-o", self._file, *command_as_typed(self._command)))
                advice = f"Make a plan for this command ({again})"
            advice += f", or train with {FLAG}, which leaves out what cannot be applied"
            self._stop(f"before the first step. {advice}")

    def _stop(self, text: str) -> NoReturn:
        self._has_stopped = True
        self._say(f"stopped {text}.")
        raise SystemExit(TargetError.exit_code)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said[text] = None
            if os.environ.get("RANK", "0") == "0":
                print(escaped(f"memfit: {text}"), file=sys.stderr, flush=True)


def _made_for_others(
    plan: PlanFile, command: tuple[str, ...], versions: Mapping[str, str], ranks: int
) -> Iterator[str]:
    """Yield what else than this run a plan was made for, as far as its file says."""
    if plan.command and plan.command != command:
        yield f"for another command: {shlex.join(command_as_typed(plan.command))}"
    if plan.command and plan.world_size != ranks:
        yield f"for {plan.world_size} rank{'s' * (plan.world_size > 1)}; this job has {ranks}"
    for name, known in (("memfit", "memfit"), ("torch", "PyTorch")):
        made_with = plan.versions.get(name, versions[name])
        if made_with != versions[name]:
            yield f"with {known} {made_with}; this is {versions[name]}"


def automatic_part_of_change(change: Change, ranks: int = 1) -> Change:
    """Return the part of a change that memfit makes while the script trains as one of some ranks."""
    left_out = ("accumulation", "sharding") if ranks == 1 else ("accumulation",)
    plan = {name: given for name, given in change.plan.items() if name not in left_out}
    divided = change.micro_batches
    arguments = change.arguments if divided is not None and divided.by_option else ()
    return replace(change, plan=plan, micro_batches=None, arguments=arguments, loader=None)


def changes_left_to_user(change: Change) -> tuple[str, ...]:
    """Return what else is in a change, and how to carry it out.

    >>> changes_left_to_user(Change({"checkpointing": {}, "accumulation": {"parts_per_batch": 2}}))
    ("accumulation: accumulate gradients in the script's loop, or use memfit.Engine.",)
    """
    left_out, divided = [], change.micro_batches
    if divided is not None and not divided.by_option:
        left_out.append(
            f"{divided.count} micro-batches of {divided.size} instead of each batch: "
            f"{'; '.join((divided.how, *divided.in_loop))}."
        )
    elif divided is None and "accumulation" in change.plan:
        left_out.append("accumulation: accumulate gradients in the script's loop, or use memfit.Engine.")
    return tuple(left_out)
