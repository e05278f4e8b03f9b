// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/pidfd"
	"github.com/weir-project/weir/internal/safefile"
	"github.com/weir-project/weir/internal/units"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// The daemons of pmacct accept bmp_daemon_max_peers BMP routers. They reset each further connection right after it
// arrived, so weir counts it as delivered.

// pmacctPeers is the default of bmp_daemon_max_peers.
const pmacctPeers = 4

// pmacctDaemons are the daemons with a BMP listener.
var pmacctDaemons = []string{"nfacctd", "sfacctd", "pmacctd", "uacctd", "pmbmpd"}

// pmacctDirs are the distributions' configuration directories. A test replaces them.
var pmacctDirs = []string{"/etc/pmacct", "/etc"}

// maxConfig is the maximum size of a configuration in bytes.
const maxConfig = 1 << 20

// examinePmacct warns about members that will reset routers.
func examinePmacct(s *state.Service, ctx context.Context, devices []state.Device, add func(text, remedy string)) {
	if !slices.ContainsFunc(s.Slots, func(slot slots.State) bool { return slot.Admitted() && pmacctName(slot.PID) != "" }) ||
		!slices.ContainsFunc(s.Endpoints, func(e service.Endpoint) bool { return e.Proto == unix.IPPROTO_TCP }) {
		return
	}
	routers := map[int]map[netip.Addr]bool{}
	for _, d := range devices {
		if d.Slot >= 0 && (d.Connects > 0 || d.Sessions > 0) {
			if routers[d.Slot] == nil {
				routers[d.Slot] = map[netip.Addr]bool{}
			}
			routers[d.Slot][d.Address] = true
		}
	}
	for _, slot := range s.Slots {
		name := pmacctName(slot.PID)
		if !slot.Admitted() || name == "" {
			continue
		}
		limit, file := pmacctLimit(ctx, slot.PID, name)
		n, remedy := len(routers[slot.Slot]), "set bmp_daemon_max_peers to the number of all routers, 2 MB each: with on_empty: next this slot may get the routers of an empty one"
		switch {
		case file == "" && n >= pmacctPeers:
			add(fmt.Sprintf("slot %d: %d routers have connected to %s (process %d), but its configuration was not found: it resets every router beyond bmp_daemon_max_peers, by default %d", slot.Slot, n, name, slot.PID, pmacctPeers), remedy)
		case file != "" && limit == 0:
			add(fmt.Sprintf("slot %d: %s of %s does not set bmp_daemon_max_peers, so it accepts %d BMP routers and resets all others (%d have connected)", slot.Slot, file, name, pmacctPeers, n), remedy)
		case file != "" && n > limit:
			add(fmt.Sprintf("slot %d: %d routers have connected to %s (process %d), but it accepts %d (bmp_daemon_max_peers in %s) and resets all others", slot.Slot, n, name, slot.PID, limit, file), remedy)
		}
	}
}

// pmacctName returns the name of a process's pmacct daemon, or "".
func pmacctName(pid int) string {
	exe, err := pidfd.Readlink(pid, "exe")
	if err != nil || !slices.Contains(pmacctDaemons, filepath.Base(exe)) {
		return ""
	}
	return filepath.Base(exe)
}

// pmacctLimit reads a daemon's limit from its configuration. limit is 0 if it is not set. file is "" if none is found.
// The daemon overwrites its command line with a title, so the unit's command is read as well.
func pmacctLimit(ctx context.Context, pid int, name string) (limit int, file string) {
	var candidates []string
	if args, err := pidfd.CommandLine(pid); err == nil {
		candidates = append(candidates, optionF(args)...)
	}
	if unit := units.OfProcess(pid); unit != "" {
		u, err := units.UnitMain(ctx, unit)
		if err == nil {
			candidates = append(candidates, optionF(u.Command)...)
		}
		for _, dir := range pmacctDirs {
			candidates = append(candidates, filepath.Join(dir, name+".conf"))
		}
	}
	for _, path := range candidates {
		if limit, err := readPmacct(path, pid); err == nil {
			return limit, path
		}
	}
	return 0, ""
}

// optionF returns the files of option -f in a command line.
func optionF(args []string) (files []string) {
	for i, a := range args {
		if a == "-f" && i+1 < len(args) {
			files = append(files, args[i+1])
		} else if path, ok := strings.CutPrefix(a, "-f"); ok && strings.HasPrefix(path, "/") {
			files = append(files, path)
		}
	}
	return slices.DeleteFunc(files, func(f string) bool { return !filepath.IsAbs(f) })
}

// readPmacct reads bmp_daemon_max_peers from a file owned by root or the daemon's user. It keeps nothing else.
func readPmacct(path string, pid int) (limit int, err error) {
	f, err := safefile.Read(path, maxConfig)
	if err != nil {
		return 0, err
	}
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d", pid), &st); err != nil || f.UID != 0 && f.UID != st.Uid {
		return 0, fmt.Errorf("%s belongs to another user", path)
	}
	lines := bufio.NewScanner(bytes.NewReader(f.Data))
	for lines.Scan() {
		key, value, ok := strings.Cut(lines.Text(), ":")
		key, _, _ = strings.Cut(strings.TrimSpace(key), "[") // suffix for one plugin
		if !ok || key != "bmp_daemon_max_peers" {
			continue
		}
		if n, err := strconv.Atoi(strings.TrimSpace(value)); err == nil && n > 0 {
			limit = n
		}
	}
	return limit, lines.Err()
}
