// SPDX-License-Identifier: Apache-2.0

package units

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/coreos/go-systemd/v22/dbus"
)

var (
	// ErrNoSystemd reports a host not booted with systemd.
	ErrNoSystemd = errors.New("this host does not run systemd")
	// ErrNoUnit reports a unit unknown to systemd.
	ErrNoUnit = errors.New("no such unit")
)

// Unit is systemd's data about a service.
type Unit struct {
	Name         string   // with its suffix
	MainPID      int      // 0 without one
	ControlGroup string   // as for CgroupProcs, "" without one
	ActiveState  string   // active, activating, inactive, failed…
	SubState     string   // running, exited, auto-restart…
	Command      []string // the first of ExecStart=
}

// UnitMain asks systemd for the main process of a service. A name without a suffix means a service,
// as for systemctl. The error wraps [ErrNoSystemd] on a host without systemd, and [ErrNoUnit] for
// an unknown name. A stopped service is no error.
func UnitMain(ctx context.Context, unit string) (Unit, error) {
	name := unitName(unit)
	if !booted() {
		return Unit{}, fmt.Errorf("unit %s: %w; name the member by pidfile, cgroup or pid instead", name, ErrNoSystemd)
	}
	c, err := dbus.NewWithContext(ctx)
	if err != nil {
		return Unit{}, fmt.Errorf("unit %s: connect to systemd over D-Bus: %w", name, err)
	}
	defer c.Close()
	return ask(ctx, c, name)
}

// OfProcess returns the service of a process, by its cgroup; "" without systemd.
func OfProcess(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil || !booted() {
		return ""
	}
	for _, name := range strings.FieldsFunc(string(b), func(c rune) bool { return c == '/' || c == '\n' }) {
		if strings.HasSuffix(name, ".service") {
			return name
		}
	}
	return ""
}

// booted is sd_booted(3).
func booted() bool {
	st, err := os.Lstat("/run/systemd/system")
	return err == nil && st.IsDir()
}

func unitName(unit string) string {
	if strings.Contains(unit, ".") {
		return unit
	}
	return unit + ".service"
}

func ask(ctx context.Context, c *dbus.Conn, name string) (Unit, error) {
	if !strings.HasSuffix(name, ".service") {
		return Unit{}, fmt.Errorf("unit %s: not a service; only services have a main process", name)
	}
	p, err := c.GetAllPropertiesContext(ctx, name)
	if err != nil {
		return Unit{}, fmt.Errorf("unit %s: ask systemd: %w", name, err)
	}
	if state, _ := p["LoadState"].(string); state == "not-found" {
		return Unit{}, fmt.Errorf("unit %s: %w; `systemctl list-units --type=service --all` lists them", name, ErrNoUnit)
	}
	u := Unit{Name: name}
	pid, ok1 := p["MainPID"].(uint32)
	group, ok2 := p["ControlGroup"].(string)
	active, ok3 := p["ActiveState"].(string)
	if !ok1 || !ok2 || !ok3 {
		return Unit{}, fmt.Errorf("unit %s: systemd's answer lacks MainPID, ControlGroup or ActiveState", name)
	}
	u.MainPID, u.ControlGroup, u.ActiveState = int(pid), group, active
	u.SubState, _ = p["SubState"].(string)
	// a(sasbttttuii): path, arguments and times of each command.
	if all, _ := p["ExecStart"].([][]any); len(all) > 0 && len(all[0]) > 1 {
		u.Command, _ = all[0][1].([]string)
	}
	return u, nil
}
