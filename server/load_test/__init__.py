"""Sends load to a server that speaks OpenAI's API, and reports what its clients would have seen: `octavo load-test`.

Stands by itself: knows nothing of the server beside it but HTTP, so that any server can be measured.
"""

# In the order of a run:
# - options: the flags; command: the run from its start to its exit code
# - connection, client: HTTP; answer: its stream; exchange_errors; preparation: what is asked before any load
# - synthetic, prompt_files, trace_prompts: what is asked, made by lengths, words, prompt_maker and request_form
# - arrivals: when it is asked; workload: puts both together into a plan
# - load: asks, with metronome's beat; trials and search: where a rate is to be found
# - record: one request; objective, summary, result: all of them; tables, screen, html_report, svg_plots: for people
