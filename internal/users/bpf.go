// SPDX-License-Identifier: Apache-2.0

package users

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// ofBPF lists the capabilities needed for BPF and attaching (capabilities(7)).
var ofBPF = []struct {
	bit  int
	name string
}{{unix.CAP_BPF, "CAP_BPF"}, {unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_PERFMON, "CAP_PERFMON"}}

// LackingForBPF describes the missing rights of this process, because the kernel's error does not. Root of a container
// may have no capabilities.
func LackingForBPF() string {
	lacks := missingCapabilities()
	switch {
	case os.Geteuid() != 0 && len(lacks) > 0:
		return "run as root, or with " + strings.Join(lacks, ", ")
	case len(lacks) > 0:
		return fmt.Sprintf("this process is root and lacks %s: add them to the container (--cap-add) or the unit (CapabilityBoundingSet=, AmbientCapabilities=)", strings.Join(lacks, ", "))
	}
	return "it has CAP_BPF: a security module, seccomp or a user namespace denies it; see the kernel log"
}

// missingCapabilities returns the ineffective capabilities. CAP_SYS_ADMIN includes CAP_BPF and CAP_PERFMON.
func missingCapabilities() (out []string) {
	for _, c := range ofBPF {
		if !Has(c.bit) && (c.bit == unix.CAP_NET_ADMIN || !Has(unix.CAP_SYS_ADMIN)) {
			out = append(out, c.name)
		}
	}
	return out
}
