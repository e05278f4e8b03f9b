// SPDX-License-Identifier: Apache-2.0

package host

import (
	"encoding/json"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

func TestDoctor(t *testing.T) {
	w := newWorld(t)
	d := w.Doctor(t.Context())
	if err := d.Able(); err != nil {
		t.Error(err)
	}
	if d.User != "root" || d.Kernel == "" || d.Kernel == "unknown" || len(d.Findings) == 0 {
		t.Errorf("diagnosis %+v", d)
	}
	for _, f := range d.Findings {
		if !slices.Contains(append(Features(), "handoff"), f.Feature) || f.Check == "" || f.Since == "" || f.Level != "ok" && !f.Optional {
			t.Errorf("finding %+v", f)
		}
	}
	w.apply(w.config(oneService, absent))
	w.foreign()
	d = w.Doctor(t.Context())
	if last := d.Findings[len(d.Findings)-1]; last.Level != "failure" || !strings.Contains(last.Text, "pins of another version") {
		t.Errorf("pins of another version: %+v", last)
	}
}

func TestDoctorWithoutRights(t *testing.T) {
	nstest.NeedRoot(t)
	c := child("doctor", "/sys/fs/bpf/absent")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	able, rest, _ := strings.Cut(string(out), "\n")
	if able != "able: probe the kernel: permission denied: run weir doctor as root" {
		t.Errorf("%s", able)
	}
	var d Diagnosis
	if err := json.Unmarshal([]byte(rest), &d); err != nil {
		t.Fatal(err)
	}
	if d.User != "uid 65534" {
		t.Errorf("user %q", d.User)
	}
	for _, f := range d.Findings {
		if f.Level == "missing" { // the kernel may have it
			t.Errorf("%s is missing: %s %s", f.Check, f.Text, f.Remedy)
		}
	}
}
