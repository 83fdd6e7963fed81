"""One guarded run on the host.

A backend calls `session.Session` before and after each execution. It is a `run.Run`, the state of
the run that all other files read, with the tasks that fall due between two steps (`session.TASKS`).
What a step or an incident leads to is passed on as a value. The files by topic:

    a step        session, run (counters, state, recording), agreement (several processes)
    an incident   incidents: detect, explain, decide, perform, report
                  bad_rows (of the data), perform (the actions)
    rollback      rollback (restore and replay), snapshots (states and batches in memory),
                  snapshots_on_disk, resume
    changes       recovery (of the policy, and their record), learning_rates
    finite        monitors, divergence, trial, trial_schedule
    the guard     arguments, loops, results, callbacks (the running fit, and what others receive)
    reports       reports
"""
