// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// capabilityNames are the capabilities of capabilities(7), by number.
var capabilityNames = strings.Fields("CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST " +
	"NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE " +
	"AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE")

// A weir serve for some features keeps only their capabilities.
func TestRightsOfSome(t *testing.T) {
	has := func(c uint, only ...string) bool { return serveRights(only)>>c&1 == 1 }
	if !has(unix.CAP_SETUID) || !has(unix.CAP_SETUID, "guard", "steer") || has(unix.CAP_SETUID, "guard") {
		t.Error("SETUID is for ready.command of steer alone")
	}
	if !has(unix.CAP_BPF, "guard") || has(unix.CAP_NET_RAW, "guard") || !has(unix.CAP_NET_RAW, "reroute") {
		t.Error("guard needs BPF and no raw sockets, reroute needs both")
	}
}

// The example units bound weir serve to the capabilities it keeps.
func TestUnitsHaveTheRights(t *testing.T) {
	for unit, only := range map[string][]string{"weir-serve": nil, "handoff/weir-lb": {"lb"}, "handoff/weir-backend": {"backend"}, "handoff/weir-keeper": {"keeper"}} {
		text, err := os.ReadFile("../examples/" + unit + ".service")
		if err != nil {
			t.Fatal(err)
		}
		var got, want []string
		for line := range strings.Lines(string(text)) {
			if list, ok := strings.CutPrefix(line, "CapabilityBoundingSet="); ok {
				got = append(got, strings.Fields(list)...)
			}
		}
		for c, all := 0, serveRights(only); c < len(capabilityNames); c++ {
			if all>>c&1 == 1 {
				want = append(want, fmt.Sprint("CAP_", capabilityNames[c]))
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s has\n%v\nwant\n%v", unit, got, want)
		}
		if len(only) > 0 && !strings.Contains(string(text), "--only "+only[0]) {
			t.Errorf("%s does not run %s alone", unit, only[0])
		}
	}
}
