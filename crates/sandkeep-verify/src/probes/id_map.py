# The ids it has on the host.
FOUND["map"] = open("/proc/self/uid_map").read().split()[1]
