"""One guarded run on the host.

A backend calls `session.Session` before and after each execution. Its `run.Run` has the facts, each
with one owner; all other files read them there. The files from top to bottom:

    the guard     attached (in a running fit, and loops without), arguments
                  reporter (console and trackers)
    a step        session: before and after it, and what is due between two
    an incident   incidents: detect, explain, decide, perform, apply the effect, report
                  perform (one function for each action), quarantine
                  rollback (which snapshot, replays of undone steps)
    lost runs     monitors, divergence, trial_schedule, trial
    results       results (of evaluate and predict), callbacks (what others receive), bad_rows
    the facts     run (with counters and recording), recovery (changes by the policy)
                  snapshots, resume, recent_batches
                  agreement (one decision in several processes)
"""
