"""The fields that ask for an answer of a certain form: every spelling means the same, and each mistake is named."""

import json

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from scheduler.sampling_params import StructuredOutput
from server.errors import InvalidRequest
from server.protocol import structured_outputs as limits
from server.protocol.structured_outputs import ResponseFormat, SchemaOrText, StructuredOutputs, structured_output_of

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"format": "é"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"format":"é"}}}'


class Fields(BaseModel):
    """As requests have them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    grammar: str | None = None
    json_schema: SchemaOrText = None


def ask(**fields):
    """What a body of these fields asks for."""
    read = TypeAdapter(Fields).validate_json(json.dumps(fields))
    return structured_output_of(**{name: getattr(read, name) for name in Fields.model_fields})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "description": "d"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "structured_outputs.json"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA, indent=2)}, "guided_json"),
        ({"json_schema": SCHEMA}, "json_schema"),
    ],
)
def test_every_way_to_give_a_schema_means_the_same_and_keeps_the_order_of_its_properties(fields, param):
    assert ask(**fields) == StructuredOutput("json_schema", TEXT, param=param)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object", param="response_format")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            StructuredOutput("json_object", param="response_format"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            StructuredOutput("json_object", param="structured_outputs.json_object"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+", param="structured_outputs.regex")),
        ({"guided_regex": "a+"}, StructuredOutput("regex", "a+", param="guided_regex")),
        (
            {"structured_outputs": {"choice": ["é", "b"]}},
            StructuredOutput("choice", '["é", "b"]', param="structured_outputs.choice"),
        ),
        ({"guided_choice": ["a"]}, StructuredOutput("choice", '["a"]', param="guided_choice")),
        (
            {"structured_outputs": {"grammar": "start: /a/"}},
            StructuredOutput("grammar", "start: /a/", param="structured_outputs.grammar"),
        ),
        ({"guided_grammar": 'root ::= "a"'}, StructuredOutput("grammar", "start: /a/\n", param="guided_grammar")),
        ({"grammar": 'root ::= "a"'}, StructuredOutput("grammar", "start: /a/\n", param="grammar")),
        ({"json_schema": True}, StructuredOutput("json_schema", "true", param="json_schema")),
        ({"guided_json": {}}, StructuredOutput("json_schema", "{}", param="guided_json")),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            StructuredOutput("json_schema", "{}", "", "structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
            StructuredOutput("json_schema", "{}", " ?", "structured_outputs.json"),
        ),
        (
            {"guided_json": {}, "guided_whitespace_pattern": " ?"},
            StructuredOutput("json_schema", "{}", " ?", "guided_json"),
        ),
    ],
)
def test_other_forms(fields, wanted):
    assert ask(**fields) == wanted


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {
            "response_format": None,
            "structured_outputs": None,
            "guided_json": None,
            "grammar": None,
            "json_schema": None,
        },
        {"grammar": ""},
    ],
)
def test_nothing_asked_for_is_nothing(fields):
    assert ask(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"guided_regex": "a", "guided_choice": ["b"]},
            "guided_choice",
            "guided_regex and guided_choice exclude each other",
        ),
        ({"response_format": {"type": "json_object"}, "json_schema": {}}, "response_format", "exclude each other"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object", "exclude"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of json, regex"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "needs one of json, regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema", "needs"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "needs"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": "[1]"}, "guided_json", "not a JSON schema"),
        ({"guided_json": '{"const": NaN}'}, "guided_json", "number that JSON does not have"),
        ({"guided_json": '{"const": 1e999}'}, "guided_json", "number that JSON does not have"),
        ({"guided_json": "[" * 100_000}, "guided_json", "not valid JSON"),
        ({"guided_json": "{" + " " * limits.MAX_SCHEMA_BYTES + "}"}, "guided_json", "131074 bytes; it may take 131072"),
        ({"json_schema": {"enum": ["x" * limits.MAX_SCHEMA_BYTES]}}, "json_schema", "it may take 131072"),
        ({"json_schema": {"a": json.loads("[" * 64 + "]" * 64)}}, "json_schema", "deeper than 64 levels"),
        ({"guided_regex": ""}, "guided_regex", "is empty"),
        ({"guided_regex": "x" * (limits.MAX_REGEX_BYTES + 1)}, "guided_regex", "16385 bytes; it may take 16384"),
        ({"guided_choice": []}, "guided_choice", "1 to 1024 strings, not 0"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice", "1 to 1024 strings, not 1025"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "empty string"),
        ({"guided_choice": ["x" * limits.MAX_CHOICES_BYTES]}, "guided_choice", "it may take 65536"),
        ({"guided_grammar": ""}, "guided_grammar", "is empty"),
        ({"grammar": "x" * (limits.MAX_GRAMMAR_BYTES + 1)}, "grammar", "65537 bytes; it may take 65536"),
        ({"grammar": "root ::= foo"}, "grammar", "the rule 'foo' is used and not defined"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "JSON",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
        ({"guided_json": {}, "guided_whitespace_pattern": " " * 257}, "guided_whitespace_pattern", "it may take 256"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            "structured_outputs.whitespace_pattern",
            "exclude each other",
        ),
    ],
)
def test_each_mistake_is_named_with_its_field(fields, param, words):
    with pytest.raises(InvalidRequest, match=words) as refused:
        ask(**fields)
    assert refused.value.param == param
    assert len(refused.value.message) < 400


def test_a_schema_of_the_greatest_depth_is_taken():
    schema = {"a": json.loads("[" * 63 + "]" * 63)}
    assert json.loads(ask(json_schema=schema).value) == schema


@pytest.mark.parametrize("field", ["guided_regex", "grammar", "json_schema"])
def test_half_a_surrogate_pair_is_no_text(field):
    value = {"const": "\ud800"} if field == "json_schema" else "\ud800"
    with pytest.raises(InvalidRequest, match="surrogate") as refused:
        structured_output_of(**{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"response_format": {"type": "xml"}}, ("response_format", "type")),
        ({"response_format": {}}, ("response_format", "type")),
        ({"response_format": {"type": "text", "strict": True}}, ("response_format", "strict")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            ("response_format", "json_schema", "name"),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            ("response_format", "json_schema", "schema"),
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, ("structured_outputs", "structural_tag")),
        (
            {"structured_outputs": {"disable_additional_properties": True}},
            ("structured_outputs", "disable_additional_properties"),
        ),
        ({"structured_outputs": {"json": [1]}}, ("structured_outputs", "json")),
        ({"structured_outputs": {"choice": ["a", 1]}}, ("structured_outputs", "choice", 1)),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, ("structured_outputs", "choice")),
        ({"guided_json": 3}, ("guided_json",)),
    ],
)
def test_a_field_of_the_wrong_type_is_named_alone(fields, path):
    with pytest.raises(ValidationError) as refused:
        ask(**fields)
    assert [error["loc"] for error in refused.value.errors()] == [path]
