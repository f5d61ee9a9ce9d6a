"""A tuned model that answers: the run's base, its adapter, its tokenizer and template, as they were trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from ajusta.base.errors import UserError
from ajusta.base.events import Listener, Note, silent
from ajusta.data.chat import chat_prompt_ids
from ajusta.engine.assemble import Assembled
from ajusta.engine.generate import Sampling, stream
from ajusta.memory.place import Place

_UNFINISHED = "\ufffd"  # a decoder shows this for a character whose bytes are not all there yet


class Speaker:
    """Answers conversations; holds the model on its place."""

    def __init__(
        self,
        model: Assembled,
        place: Place,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_token_ids: Sequence[int],
        system: str | None,
        position_limit: int | None,
        listener: Listener = silent,
    ) -> None:
        self.model, self.place, self.tokenizer = model, place, tokenizer
        self.end_token_ids, self.system, self.position_limit = tuple(end_token_ids), system, position_limit
        self._listener = listener

    def answer(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Iterator[str]:
        """Yield the answer to a conversation in pieces of text, until an end token or `max_tokens`.

        Where conversation and answer would outgrow the model's positions, the oldest turns are left out, the listener
        is told, and an answer ends where the positions end.

        Raises:
            UserError: the last turn alone is longer than the model can take.
        """
        prompt = self.prompt_ids(messages, room_for=max_tokens)
        sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
        room = max_tokens if self.position_limit is None else min(max_tokens, self.position_limit - len(prompt))
        ids: list[int] = []
        said = ""
        for column in stream(self.model.chain, self.place, [prompt], max_new_tokens=room, sampling=sampling):
            if column[0] in self.end_token_ids:
                break
            ids.append(column[0])
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            if text.endswith(_UNFINISHED) or text == said:
                continue
            yield text[len(said) :]
            said = text
        rest = str(self.tokenizer.decode(ids, skip_special_tokens=True))[len(said) :]
        if rest:
            yield rest

    def prompt_ids(self, messages: Sequence[Mapping[str, object]], room_for: int) -> list[int]:
        """Return the ids that ask for the next answer, with `room_for` positions (half of all at most) left for it.

        Raises:
            UserError: the last turn alone is longer than the model can take.
        """
        turns = list(messages)
        ids = chat_prompt_ids(self.tokenizer, turns, system=self.system)
        most = None if self.position_limit is None else self.position_limit - min(room_for, self.position_limit // 2)
        while most is not None and len(ids) > most:
            users = [index for index, turn in enumerate(turns) if turn.get("role") == "user"]
            if len(users) < 2:
                raise UserError(
                    f"the question has {len(ids)} tokens; expected at most {most}, the model's {self.position_limit} "
                    "positions less the answer; ask something shorter"
                )
            turns = [*(turn for turn in turns[: users[0]] if turn.get("role") == "system"), *turns[users[1] :]]
            ids = chat_prompt_ids(self.tokenizer, turns, system=self.system)
        if len(turns) < len(messages):
            left_out = len(messages) - len(turns)
            text = f"the {left_out} oldest turns were left out: the model takes {self.position_limit} tokens at most"
            self._listener(Note(text=text, warning=True))
        return ids
