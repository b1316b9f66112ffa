# What surrounds every program here, as the kernel tells it.
status = dict(line.rstrip("\n").split(":\t", 1) for line in open("/proc/self/status") if ":\t" in line)
control("CapBnd" in status and "Seccomp" in status, "the kernel tells nothing")
bits = int(status["CapBnd"], 16)
for name, bit in (("sys_module", 16), ("sys_rawio", 17), ("sys_boot", 22), ("sys_time", 25), ("net_admin", 12), ("syslog", 34),
                  ("perfmon", 38), ("bpf", 39), ("sys_admin", 21), ("dac_read_search", 2), ("mac_admin", 33)):
    (worked if bits >> bit & 1 else refused)(f"capability {name}")
(refused if status["Seccomp"].strip() == "2" else worked)(f"seccomp mode {status['Seccomp'].strip()}")
first = open("/proc/self/uid_map").read().split()
(worked if first[1] == "0" else refused)(f"its root is user {first[1]} of the host")
