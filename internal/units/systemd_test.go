// SPDX-License-Identifier: Apache-2.0

package units

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/internal/nstest"
)

// TestUnitMain queries a real systemd.
func TestUnitMain(t *testing.T) {
	nstest.Enter(t)
	systemctl := nstest.Systemd(t, map[string]string{
		"collector@.service": "[Service]\nType=exec\nExecStart=/bin/sleep 1000\n",
		"broken.service":     "[Service]\nExecStart=/bin/false\n",
	})
	must := func(args ...string) {
		t.Helper()
		if _, err := systemctl(args...); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()

	must("start", "collector@1.service")
	u, err := UnitMain(ctx, "collector@1") // without its suffix
	if err != nil {
		t.Fatal(err)
	}
	if u.Name != "collector@1.service" || u.ActiveState != "active" || u.SubState != "running" || u.MainPID <= 0 ||
		!strings.HasSuffix(u.ControlGroup, "/collector@1.service") {
		t.Fatalf("got %+v", u)
	}
	if comm, err := os.ReadFile("/proc/" + strconv.Itoa(u.MainPID) + "/comm"); err != nil || string(comm) != "sleep\n" {
		t.Errorf("process %d is %q, %v; want sleep", u.MainPID, comm, err)
	}
	if _, err := CgroupRoot(); err == nil {
		pids, err := CgroupProcs(u.ControlGroup)
		if err != nil || !slices.Equal(pids, []int{u.MainPID}) {
			t.Errorf("processes of %s: %v, %v; want %d", u.ControlGroup, pids, err, u.MainPID)
		}
	}

	must("stop", "collector@1.service")
	if u, err := UnitMain(ctx, "collector@1.service"); err != nil || u.MainPID != 0 || u.ActiveState != "inactive" {
		t.Errorf("stopped: %+v, %v", u, err)
	}
	// Its start succeeds. The program's failure appears a little later.
	must("start", "broken.service")
	nstest.Eventually(t, func() error {
		u, err := UnitMain(ctx, "broken.service")
		if err != nil || u.MainPID != 0 || u.ActiveState != "failed" {
			return fmt.Errorf("failed: %+v, %v", u, err)
		}
		return nil
	})
	if u, err := UnitMain(ctx, "absent.service"); !errors.Is(err, ErrNoUnit) {
		t.Errorf("absent: %+v, %v; want ErrNoUnit", u, err)
	}
	if u, err := UnitMain(ctx, "basic.target"); err == nil || !strings.Contains(err.Error(), "not a service") {
		t.Errorf("a target: %+v, %v", u, err)
	}
	ended, end := context.WithCancel(ctx)
	end()
	if _, err := UnitMain(ended, "collector@1.service"); err == nil {
		t.Error("with an ended context: no error")
	}
}
