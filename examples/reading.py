"""Reads little stories and answers where somebody is and who went somewhere: attention of the question over the passage.

A key knows the words around its own and where it stands in the story; a value is the word itself. The question word, "where" or "who", is
the query, after it has looked over its own question. The answer is made of nothing but the words that the query looks at in the story, so
that its weights say where the answer was found. A story mentions places where nobody goes, and places that somebody has left.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

import tiled_attention as ta

PEOPLE = ("anna", "boris", "clara", "david", "emma", "felix")
PLACES = ("attic", "cellar", "garden", "hall", "kitchen", "library", "office", "park")
MOVES = ("went", "ran", "walked", "hurried")
OTHERS = ("looked", "pointed", "listened")
QUESTIONS = ("where", "who")
WORDS = ("<pad>", *PEOPLE, *PLACES, *MOVES, *OTHERS, "to", "the", ".", "where", "who", "is", "entered", "?")
CODES = {word: code for code, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Question:
    """A question about a story.

    Attributes:
        words: "where is anna ?" or "who entered the garden ?", which means the last who did.
        answer: a word of the story.
        place: which word of the story is the answer.
    """

    words: tuple[str, ...]
    answer: str
    place: int


@dataclass(frozen=True)
class Story:
    """Sentences "anna went to the garden ." and "boris pointed to the hall .", of which only the first moves anybody."""

    words: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Outcome:
    """What was reached on new stories, one number for each question word ("where", "who").

    Attributes:
        accuracy: share of right answers.
        on_answer: mean weight on the one word that is the answer's source.
        on_kind: mean weight on the words of the answer's kind (places for "where", people for "who").
        chance: mean share of the source among the words of its kind: the weight that it had if all of these were looked at alike.
    """

    accuracy: dict[str, float]
    on_answer: dict[str, float]
    on_kind: dict[str, float]
    chance: dict[str, float]


def tell(draw: random.Random, num_sentences: int, num_questions: int) -> Story:
    """A story and questions about it, some of which may be the same."""
    words: list[str] = []
    where: dict[str, int] = {}  # person -> index of the place word where they went last
    who: dict[str, int] = {}  # place -> index of the person who went there last
    while len(words) < 6 * num_sentences or not where:
        person, place = draw.choice(PEOPLE), draw.choice(PLACES)
        verb = draw.choice(MOVES if draw.random() < 0.6 else OTHERS)
        if verb in MOVES:
            where[person], who[place] = len(words) + 4, len(words)
        words += [person, verb, "to", "the", place, "."]
    questions = []
    for _ in range(num_questions):
        if draw.random() < 0.5:
            person, index = draw.choice(list(where.items()))
            asked: tuple[str, ...] = ("where", "is", person, "?")
        else:
            place, index = draw.choice(list(who.items()))
            asked = ("who", "entered", "the", place, "?")
        questions.append(Question(asked, words[index], index))
    return Story(tuple(words), tuple(questions))


def encode(texts: Sequence[Sequence[str]]) -> tuple[Tensor, Tensor]:
    """(codes (batch, seqlen) padded with 0, lengths (batch,)), int64."""
    codes = [torch.tensor([CODES[word] for word in text]) for text in texts]
    return nn.utils.rnn.pad_sequence(codes, batch_first=True), torch.tensor([len(text) for text in texts])


class Reader(nn.Module):
    """A convolution over the passage, self-attention from the question word over its question, cross-attention from it to the passage."""

    def __init__(self, width: int, longest: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), width, padding_idx=0)
        self.position = ta.LearnedEmbedding(longest, width)
        self.passage = nn.Conv1d(width, 2 * width, kernel_size=9, padding=4)
        self.question = nn.Linear(width, 3 * width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(2 * width, width)

    def forward(self, passage: Tensor, lengths: Tensor, questions: Tensor, question_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (batch, num_questions, words) and weights (batch, num_questions, seqlen).

        passage (batch, seqlen), lengths (batch,), questions (batch * num_questions, seqlen_q), question_lengths likewise.
        """
        words = self.embedding(passage)
        places = words + self.position(torch.arange(passage.shape[1]))
        states = F.gelu(self.passage(places.mT)).mT  # (batch, seqlen, 2 * width)
        asked = self.embedding(questions)
        query, key, value = self.question(asked)[:, None].chunk(3, -1)  # (batch * num_questions, 1 head, seqlen_q, width)
        told = ta.attention(query[:, :, :1], key, value, mask=ta.KeyLengths(question_lengths))[:, 0, 0]
        query = self.query((asked[:, 0] + told).unflatten(0, (len(passage), -1)))[:, None]  # (batch, 1 head, num_questions, width)
        key, mask = self.key(states)[:, None], ta.KeyLengths(lengths)
        found = ta.attention(query, key, words[:, None], mask=mask)[:, 0]
        weights = ta.attention_weights(query, key, mask=mask)[:, 0]
        return found @ self.embedding.weight.T * found.shape[-1] ** -0.5, weights


def ask(model: Reader, stories: Sequence[Story]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (batch, num_questions, words), weights (batch, num_questions, seqlen), answers (batch, num_questions)."""
    asked = encode([question.words for story in stories for question in story.questions])
    logits, weights = model(*encode([story.words for story in stories]), *asked)
    answers = torch.tensor([[CODES[question.answer] for question in story.questions] for story in stories])
    return logits, weights, answers


def train(model: Reader, steps: int, batch: int, sentences: int, draw: random.Random) -> None:
    """Trains on stories of 3 to `sentences` sentences, told anew in every step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in track(range(steps), description="training"):
        logits, _, answers = ask(model, [tell(draw, draw.randint(3, sentences), 4) for _ in range(batch)])
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def examine(model: Reader, stories: Sequence[Story]) -> Outcome:
    """Asks, and sees where the question word looks."""
    logits, weights, answers = ask(model, stories)
    right = logits.argmax(-1) == answers
    sums = {name: dict.fromkeys(QUESTIONS, 0.0) for name in ("accuracy", "on_answer", "on_kind", "chance")}
    count = dict.fromkeys(QUESTIONS, 0)
    for i, story in enumerate(stories):
        for j, question in enumerate(story.questions):
            word = question.words[0]
            kind = [index for index, found in enumerate(story.words) if found in (PLACES if word == "where" else PEOPLE)]
            count[word] += 1
            sums["accuracy"][word] += right[i, j].item()
            sums["on_answer"][word] += weights[i, j, question.place].item()
            sums["on_kind"][word] += weights[i, j, kind].sum().item()
            sums["chance"][word] += 1 / len(kind)
    return Outcome(**{name: {word: total / max(1, count[word]) for word, total in found.items()} for name, found in sums.items()})


@torch.no_grad()
def draw_weights(model: Reader, story: Story, path: Path) -> None:
    """The questions (down), each once, over the words of the story (across)."""
    from matplotlib import pyplot

    story = replace(story, questions=tuple(dict.fromkeys(story.questions)))
    _, weights, _ = ask(model, [story])
    figure, axes = pyplot.subplots(figsize=(0.26 * len(story.words) + 2, 0.3 * len(story.questions) + 1.5))
    labels = [f"{question.words[0]}: {question.words[-2]}" for question in story.questions]
    ta.plot.heatmap(weights[0], tokens=labels, key_tokens=list(story.words), axes=axes, title="Where each question looks")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def run(steps: int, batch: int, width: int, sentences: int, tested: int, seed: int) -> tuple[Outcome, Reader, Story]:
    """Trains, and asks about `tested` new stories of full length; the story of the return has many questions."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model = Reader(width, 6 * (sentences + 8))
    train(model, steps, batch, sentences, draw)
    stories = [tell(draw, sentences, 4) for _ in range(tested)]
    return examine(model.eval(), stories), model, tell(draw, sentences, 24)


def main(argv: Sequence[str] | None = None) -> Outcome:
    """Parses the arguments, runs, prints, draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="stories in a step, with four questions each (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="features of a word (default: %(default)s)")
    parser.add_argument("--sentences", type=int, default=8, help="sentences of the longest stories, at least 3 (default: %(default)s)")
    parser.add_argument("--tested", type=int, default=500, help="stories to test on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of stories and weights (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("example-results"), help="folder for the picture (default: %(default)s)")
    args = parser.parse_args(argv)
    for name, smallest in (("steps", 1), ("batch", 1), ("width", 1), ("sentences", 3), ("tested", 1)):
        if getattr(args, name) < smallest:
            parser.error(f"argument --{name}: expected at least {smallest}, got {getattr(args, name)}")

    outcome, model, story = run(args.steps, args.batch, args.width, args.sentences, args.tested, args.seed)
    for word in QUESTIONS:
        print(
            f"{word:5}  {outcome.accuracy[word]:6.1%} right; weight on the answer's word {outcome.on_answer[word]:.2f} "
            f"(uniform over its kind: {outcome.chance[word]:.2f}), on all words of its kind {outcome.on_kind[word]:.2f}"
        )
    matplotlib.use("agg")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "reading.png"
    draw_weights(model, story, path)
    print(f"weights: {path}")
    return outcome


if __name__ == "__main__":
    main()
