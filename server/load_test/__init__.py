"""Sends load to a server that speaks OpenAI's API, and reports what its clients would have seen: `octavo load-test`.

Stands by itself: knows nothing of the server beside it but HTTP, so that any server can be measured. In the order of a
run:
options      options (the flags), command (the run from its start to its exit code)
server       connection and client (HTTP), answer (its stream), exchange_errors, preparation (before any load)
what to ask  synthetic, prompt_files, trace_prompts: sessions; with lengths, words, prompt_maker and request_form
when to ask  arrivals; workload puts both together into a plan
asking       load, with metronome; trials and search where a rate is to be found
results      record (one request), summary with objective, result (JSON), tables, screen, html_report with svg_plots
"""
