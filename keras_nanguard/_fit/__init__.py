"""One guarded run on the host.

A backend calls `session.Session` before and after each execution. Its `run.Run` has the facts. Each
has one owner, whose methods change it; all others only read it. The files from top to bottom:

    the guard     attached (in a running fit), loop (without a fit), arguments
                  log (what is printed and recorded)
    a step        session (before and after it), tasks (between two), due (when)
    an incident   incidents: detect, explain, decide, perform, apply the effect, report
                  refusals (why a step was refused), overflow (which ones loss scaling handles)
                  perform (one function for each action), action_context (its arguments)
                  choose_snapshot, rollback (restores it, and replays undone steps)
                  poles (of schedules), state_check (is the state finite?)
    lost runs     monitors, divergence (when to run trials), proof (what they show), trial
    data          bad_data (bad rows), batchnorm (moving statistics), lagging (do they follow?)
    callbacks     callbacks (what others receive, and results that are not finite)
    the facts     run, steps (counts, batches), recovery (policy), rates
                  snapshots, their files (snapshot_files), resume
                  agreement (one decision in several processes)
"""
