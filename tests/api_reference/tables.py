"""Which decisions are about which schema of fields.json, and which of them decides on a field."""

from dataclasses import dataclass

from tests.api_reference import decisions, responses
from tests.api_reference.decisions import Decision


@dataclass(frozen=True, slots=True)
class Table:
    """One schema of the description and what becomes of its fields."""

    schema: str  # its name in fields.json
    route: str
    decisions: dict[str, Decision]

    def of(self, field: str) -> tuple[str, Decision] | None:
        """The longest place that covers a field, and its decision."""
        covering = [place for place in self.decisions if _covers(place, field)]
        return max(((place, self.decisions[place]) for place in covering), key=_specificity, default=None)


def _covers(place: str, field: str) -> bool:
    return field.startswith(place[:-1]) if place.endswith("*") else field == place


def _specificity(item: tuple[str, Decision]) -> tuple[int, bool]:
    place, _ = item
    return len(place.rstrip("*")), not place.endswith("*")


REQUESTS = (
    Table("CreateCompletionRequest", "/v1/completions", decisions.COMPLETIONS),
    Table("CreateChatCompletionRequest", "/v1/chat/completions", decisions.CHAT),
    Table("CreateEmbeddingRequest", "/v1/embeddings", decisions.EMBEDDINGS),
    Table("CreateResponse", "/v1/responses", responses.RESPONSES),
    Table("TokenCountsBody", "/v1/responses/input_tokens", responses.INPUT_TOKENS),
)
ANSWERS = (
    Table("CreateCompletionResponse", "/v1/completions", decisions.COMPLETION_ANSWER),
    Table("CreateChatCompletionResponse", "/v1/chat/completions", decisions.CHAT_ANSWER),
    Table("CreateChatCompletionStreamResponse", "/v1/chat/completions", decisions.CHAT_CHUNK),
    Table("ListModelsResponse", "/v1/models", decisions.MODELS),
    Table("CreateEmbeddingResponse", "/v1/embeddings", decisions.EMBEDDING_ANSWER),
    Table("Response", "/v1/responses", responses.RESPONSE),
    Table("TokenCountsResource", "/v1/responses/input_tokens", {"*": decisions.given()}),
)
