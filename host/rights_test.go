// SPDX-License-Identifier: Apache-2.0

package host

import (
	"fmt"
	"os"
	"os/exec"
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
	if !has(unix.CAP_SYS_ADMIN, "guard") || has(unix.CAP_NET_RAW, "guard") || !has(unix.CAP_NET_RAW, "reroute") {
		t.Error("guard loads programs and needs no raw sockets, reroute needs both")
	}
	if serveRights([]string{"keeper"}) != 0 {
		t.Error("the keeper needs no capability")
	}
}

// unitsOfRoles are the roles of weir serve.
var unitsOfRoles = map[string][]string{"weir-serve": nil, "handoff/weir-lb": {"lb"}, "handoff/weir-backend": {"backend"}, "handoff/weir-keeper": {"keeper"}}

// The units give weir serve the capabilities it keeps, and no others.
func TestUnitsHaveTheRights(t *testing.T) {
	for unit, only := range unitsOfRoles {
		text, err := os.ReadFile("../examples/" + unit + ".service")
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		for c, all := 0, serveRights(only); c < len(capabilityNames); c++ {
			if all>>c&1 == 1 {
				want = append(want, fmt.Sprint("CAP_", capabilityNames[c]))
			}
		}
		slices.Sort(want)
		for _, set := range []string{"CapabilityBoundingSet=", "AmbientCapabilities="} {
			var got []string
			for line := range strings.Lines(string(text)) {
				if list, ok := strings.CutPrefix(line, set); ok {
					got = append(got, strings.Fields(list)...)
				}
			}
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("%s: %s has\n%v\nwant\n%v", unit, set, got, want)
			}
		}
		for _, line := range []string{"User=weir\n", "\nCapabilityBoundingSet=", "\nNoNewPrivileges=yes\n"} {
			if !strings.Contains(string(text), line) {
				t.Errorf("%s has no line %q", unit, line)
			}
		}
		if len(only) > 0 && !strings.Contains(string(text), "--only "+only[0]) {
			t.Errorf("%s does not run %s alone", unit, only[0])
		}
	}
}

// The exposure of each unit by systemd-analyze is at most 5.0, and as in docs/PRIVILEGES.md.
func TestExposure(t *testing.T) {
	tool, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("need: tool systemd-analyze")
	}
	page, err := os.ReadFile("../docs/PRIVILEGES.md")
	if err != nil {
		t.Fatal(err)
	}
	for unit := range unitsOfRoles {
		out, err := exec.Command(tool, "security", "--offline=true", "--threshold=50", "../examples/"+unit+".service").CombinedOutput()
		_, level, ok := strings.Cut(string(out), "exposure level for ")
		if strings.Contains(string(out), "unrecognized option") {
			t.Skip("need: systemd-analyze of systemd 250")
		}
		if err != nil || !ok {
			t.Errorf("%s: %v: %s", unit, err, level)
			continue
		}
		f := strings.Fields(level) // NAME: LEVEL WORD
		t.Log(f[0], f[1])
		name := strings.Replace(strings.TrimSuffix(f[0], ":"), "weir-serve", "weir", 1)
		if row := fmt.Sprintf("| `%s` | %s |", name, f[1]); !strings.Contains(string(page), row) {
			t.Errorf("docs/PRIVILEGES.md has no row %q", row)
		}
	}
}
