// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// capabilities are those that BPF and attaching ask for (capabilities(7)).
var capabilities = []struct {
	bit  uint
	name string
}{{unix.CAP_BPF, "CAP_BPF"}, {unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_PERFMON, "CAP_PERFMON"}}

// rightsLacking says what this process lacks, for an error of the kernel's that does not:
// a container's root may have none of the capabilities.
func rightsLacking() string {
	lacks := missingCapabilities()
	switch {
	case os.Geteuid() != 0 && len(lacks) > 0:
		return "run as root, or with " + strings.Join(lacks, ", ")
	case len(lacks) > 0:
		return fmt.Sprintf("this process is root and lacks %s: add them to the container (--cap-add) or the unit (CapabilityBoundingSet=, AmbientCapabilities=)", strings.Join(lacks, ", "))
	}
	return "it has CAP_BPF: a security module, seccomp or a user namespace refuses; see the kernel's log"
}

// missingCapabilities are those that are not effective. CAP_SYS_ADMIN stands for CAP_BPF
// and CAP_PERFMON.
func missingCapabilities() (out []string) {
	status, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		return nil
	}
	var effective uint64
	for line := range strings.Lines(string(status)) {
		if text, ok := strings.CutPrefix(line, "CapEff:"); ok {
			effective, err = strconv.ParseUint(strings.TrimSpace(text), 16, 64)
		}
	}
	if err != nil {
		return nil
	}
	for _, c := range capabilities {
		admin := c.bit != unix.CAP_NET_ADMIN && effective&(1<<unix.CAP_SYS_ADMIN) != 0
		if effective&(1<<c.bit) == 0 && !admin {
			out = append(out, c.name)
		}
	}
	return out
}
