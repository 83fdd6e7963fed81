"""One guarded run on the host.

A backend calls `session.Session` before and after each execution. It is a `run.Run`, the state of
the run that all other files read, with the tasks that fall due between two steps (`session.TASKS`).
The files by topic:

    a step        session, run, counts, agreement (several processes)
    an incident   incidents: detect, explain, decide, perform, report
                  sightings, bad_rows, row_search, quarantine (bad data), perform (the actions)
    rollback      rollback (restore and replay), recent_batches, snapshots, snapshots_on_disk,
                  snapshot_files, resume, guard_state
    changes       recovery, learning_rates, recalibration (the policy's changes)
    finite        monitors, divergence, trial, schedule_poles, lagging_statistics
    the guard     arguments, running_fit, loops, policy_lines, results, checkpoint_firewall
    reports       flight, recorded, reporter, epoch_logs, layer_looks, trackers
"""
