"""One line of the benchmark's report."""

from dataclasses import dataclass, field


@dataclass
class Row:
    """ours and theirs in `unit`, theirs None where nothing is compared; share of the peak or None; met None where there is no target."""

    claim: str
    what: str
    against: str = ""
    unit: str = ""
    ours: float | None = None
    theirs: float | None = None
    share: float | None = None
    targets: list[str] = field(default_factory=list)
    met: bool | None = None
    wrong: bool = False

    @property
    def ratio(self) -> float | None:
        """Theirs over ours: above 1 where ours is smaller."""
        return self.theirs / self.ours if self.ours and self.theirs is not None else None

    def _target(self, text: str, met: bool) -> None:
        self.targets.append(text)
        self.met = met and self.met is not False

    def want(self, *, at_least: float | None = None, at_most: float | None = None, min_share: float | None = None) -> "Row":
        """Set targets: theirs over ours, ours over theirs, share of the peak."""
        if at_least is not None and self.ratio is not None:
            self._target(f">= {at_least:g}x", self.ratio >= at_least)
        if at_most is not None and self.ours is not None and self.theirs is not None:
            self._target(f"<= {at_most:.3g} of theirs", self.ours <= at_most * self.theirs)
        if min_share is not None and self.share is not None:
            self._target(f">= {min_share:.0%} of peak", self.share >= min_share)
        return self

    def want_value(self, *, at_most: float) -> "Row":
        """Set a target for `ours` itself."""
        if self.ours is not None:
            self._target(f"<= {at_most:.4g} {self.unit}", self.ours <= at_most)
        return self

    def cells(self) -> list[str]:
        """For a table."""
        if self.wrong:
            return [self.claim, self.what, self.against, *[""] * 6, "WRONG RESULT"]
        numbers = ["" if value is None else f"{value:.4g}" for value in (self.ours, self.theirs)]
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}x"
        share = "" if self.share is None else f"{self.share:.1%}"
        met = "" if self.met is None else ("yes" if self.met else "no")
        return [self.claim, self.what, self.against, *numbers, self.unit, ratio, share, ", ".join(self.targets), met]

    def line(self) -> str:
        """For a log."""
        claim, what, against, ours, theirs, unit, ratio, share, targets, met = self.cells()
        compared = f"{ours} {unit}" + (f", {against} {theirs} {unit} ({ratio})" if theirs else "")
        return f"{claim}: {what}: {compared} {share} {targets} {met}".rstrip()
