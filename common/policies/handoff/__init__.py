"""The hand-off of one prompt's KV from the worker that computed it to the one that decodes it (docs/handoff.md).

Two machines, `owner` (the publication at prefill) and `puller` (the decode side), and the `tables` that hold them.
All are pure: an event and the time `now`, in seconds of any steady clock, go in; the new state and the actions to
carry out come out. common/transfer carries them out, tests/unit/handoff runs the same code in a simulated world.
"""
