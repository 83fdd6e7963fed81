"""One guarded run on the host.

A backend calls `session.Session` before and after each execution. Its `run.Run` has the facts, each
with one owner; all other files read them there. The files from top to bottom:

    the guard     attached (in a running fit), loop (without a fit), arguments
                  log (what is printed and recorded)
    a step        session (before and after it), tasks (what is due between two)
    an incident   incidents: detect, explain, decide, perform, apply the effect, report
                  perform (one function for each action)
                  rollback (which snapshot, replays of undone steps), poles (of schedules)
    lost runs     monitors, divergence (when to run trials), proof (what they show), trial
    data          bad_data (bad rows), batchnorm (moving statistics)
    callbacks     callbacks (what others receive, and results that are not finite)
    the facts     run, steps (counts, batches), recovery (policy), rates
                  snapshots, their files (snapshot_files), resume
                  agreement (one decision in several processes)
"""
