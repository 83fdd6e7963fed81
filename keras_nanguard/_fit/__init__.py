"""One guarded run on the host.

A backend calls `session.Session` before and after each execution. Its `run.Run` has the facts, each
with one owner; all other files read them there. The files from top to bottom:

    the guard     attached (in a running fit, and loops without), arguments
                  reporter (console)
    a step        session (before and after it), tasks (what is due between two)
    an incident   incidents: detect, explain, decide, perform, apply the effect, report
                  perform (one function for each action)
                  rollback (which snapshot, replays of undone steps)
    lost runs     monitors, divergence (when to run trials), proof (what they show), trial
    data          bad_data (bad rows), batchnorm (moving statistics)
    callbacks     callbacks (what others receive, and results that are not finite)
    the facts     run (with counters and recording), recovery (changes by the policy), rates
                  snapshots, their files (snapshot_files), resume, recent_batches
                  agreement (one decision in several processes)
"""
