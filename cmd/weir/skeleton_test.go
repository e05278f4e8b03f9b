// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/units"
)

// A feature without a command file appears in status, doctor, help and completion, and gets weir NAME status.
func TestSkeletonCommands(t *testing.T) {
	nstest.NeedRoot(t)
	top, err := units.CgroupRoot()
	if err != nil {
		t.Skip("need: kernel cgroup2:", err)
	}
	cgroup := filepath.Join(top, fmt.Sprintf("weir-commands-%d", os.Getpid()))
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(cgroup)
	pins, file := root(t), filepath.Join(t.TempDir(), "weir.yaml")
	if err := os.WriteFile(file, []byte("skeleton: [{name: web, cgroup: /"+filepath.Base(cgroup)+"}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(want string, args ...string) {
		t.Helper()
		out, errs, status := finish(t, commandOf("weir-skeleton", append([]string{"--root", pins}, args...)...))
		if status != 0 || !regexp.MustCompile("(?s)^"+want+"$").MatchString(out+errs) {
			t.Errorf("weir %s: status %d, and it says\n%s\nwant\n%s", strings.Join(args, " "), status, out+errs, want)
		}
	}
	run(`create skeleton web\n`, "apply", "-f", file)
	table := `SKELETON +CGROUP +PACKETS\nweb +/weir-commands-\d+ +0\n`
	run(table, "status")
	run(table, "skeleton", "status")
	run(`\{\n  "items": \[\n    \{\n      "name": "web",.*`, "skeleton", "status", "--json")
	run(`.*weir skeleton status +applied state.*`, "--help")
	run(`.*skeleton.*`, "__complete", "remove", "")
	run(`nothing to upgrade: .*`, "upgrade")
	run(``, "remove", "skeleton")
	run(`no state of skeleton: .*`, "skeleton", "status")
}
