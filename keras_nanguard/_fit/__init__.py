"""One guarded run on the host.

A backend calls `session.Session` before and after each execution. Its `run.Run` has the facts, each
with one owner; all other files read them there. The files by topic:

    a step        session (before and after it), tasks (what is due between two)
    the facts     run (train state), counts, recording, agreement (several processes)
    an incident   incidents: detect, explain, decide, perform, report
                  bad_rows (of the data), perform (the actions)
    rollback      rollback (restore and replay), snapshots (states and batches in memory),
                  snapshots_on_disk, resume
    changes       recovery (of the policy, and their record), learning_rates
    finite        monitors, divergence, trial, trial_schedule
    the guard     arguments, loops, results, callbacks (the running fit, and what others receive)
    reports       reports
"""
