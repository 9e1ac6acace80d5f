"""One description of a cluster, and the platforms that can run it.

`cluster.yaml` describes the processes; `description` reads and checks it, `processes` turns it into
the list of processes, and a platform (this host, systemd, Slurm, Ray, Kubernetes) runs that list.
Nothing here holds a model or a request.
"""
