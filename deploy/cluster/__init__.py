"""One description of a cluster, and the platforms that can run it.

`cluster.yaml` says what runs; `description` reads and checks it, `processes` turns it into the list
of processes, and a `platform` (this host, systemd, Slurm, Ray, Kubernetes) runs that list. The
command line calls `commands`. Nothing here holds a model or a request, and no platform states a
command of its own: all of them run the `ProcessSpec`s.
"""
