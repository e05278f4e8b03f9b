// SPDX-License-Identifier: Apache-2.0

package host

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// Finding is one result of weir doctor.
type Finding struct {
	Feature  string `json:"feature"`
	Check    string `json:"check"`
	Since    string `json:"since,omitempty"` // first kernel version with it
	Level    string `json:"level"`           // ok, note, warning, missing, failure: see health
	Text     string `json:"text,omitempty"`
	For      string `json:"for,omitempty"` // lost function of a missing facility
	Remedy   string `json:"remedy,omitempty"`
	Optional bool   `json:"optional,omitempty"`
}

// Diagnosis is the result of weir doctor.
type Diagnosis struct {
	Kernel   string    `json:"kernel"`
	User     string    `json:"user"`
	Findings []Finding `json:"findings"`

	denied bool // this user may not probe all needs
}

// Able returns an error if a feature cannot run, because one of its needs is missing.
func (d Diagnosis) Able() error {
	if d.denied {
		return fmt.Errorf("probe the kernel: %w: run weir doctor as root", os.ErrPermission)
	}
	var missing []string
	for _, f := range d.Findings {
		if f.Level == "missing" {
			missing = append(missing, f.Feature+" needs "+f.Check)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", kernel.ErrUnsupported, strings.Join(missing, "; "))
}

// Doctor probes the features' needs, and checks the running host for common faults.
func (h *Host) Doctor(ctx context.Context) Diagnosis {
	d := Diagnosis{Kernel: kernelRelease(), User: "root"}
	if uid := os.Geteuid(); uid != 0 {
		d.User = fmt.Sprintf("uid %d", uid)
	}
	for _, f := range features {
		d.probe(f.Name, f.Needs(&feature.Document{}))
	}
	d.faults(ctx, h)
	d.unconfirmed(h)
	d.halfDone(h)
	for _, f := range features {
		d.examine(ctx, h.Root, f)
	}
	return d
}

// probe probes a feature's kernel needs.
func (d *Diagnosis) probe(name string, needs []kernel.Need) {
	for _, n := range needs {
		f := Finding{Feature: name, Check: n.Name, Since: n.Since, Level: "ok", Optional: n.Optional}
		if err := n.Probe(); err != nil {
			f.Level, f.Text, f.Remedy = "missing", err.Error(), n.RemedyFor(err)
			d.denied = d.denied || !n.Optional && errors.Is(err, os.ErrPermission)
			if kernel.Scarce(err) || !n.Optional && errors.Is(err, os.ErrPermission) {
				f.Level = "warning" // the kernel may have it
			} else if n.Optional {
				f.Level, f.For = "note", n.For
			}
		}
		d.Findings = append(d.Findings, f)
	}
}

// faults adds damage to the pins.
func (d *Diagnosis) faults(ctx context.Context, h *Host) {
	faults, err := h.Faults(ctx)
	err = errors.Join(h.Root.Located(), err)
	if err != nil && !errors.Is(err, kernel.ErrUnreadable) {
		d.Findings = append(d.Findings, Finding{Feature: "weir", Check: "pins", Level: "warning", Text: err.Error()})
	}
	for _, f := range faults {
		d.Findings = append(d.Findings, newFinding(cmp.Or(f.Feature, "weir"), feature.Finding{Object: f.Object, Text: f.Text, Remedy: f.Remedy, Fails: f.Damage()}))
	}
}

// unconfirmed adds a change that waits for confirmation or was rolled back.
func (d *Diagnosis) unconfirmed(h *Host) {
	u, err := h.Unconfirmed()
	if unreadable(err) {
		return // no sign of a change
	} else if err != nil {
		d.Findings = append(d.Findings, Finding{Feature: "weir", Check: "unconfirmed change", Level: "warning", Text: err.Error()})
	} else if u != nil {
		f := u.Finding()
		d.Findings = append(d.Findings, Finding{Feature: "weir", Check: f.Object, Level: "warning", Text: f.Text, Remedy: f.Remedy})
	}
}

// halfDone adds a change made in part by a killed command.
func (d *Diagnosis) halfDone(h *Host) {
	half, err := h.HalfDone()
	if half == nil || err != nil {
		return // without the right to read the note, nobody knows
	}
	f := half.Finding()
	d.Findings = append(d.Findings, Finding{Feature: "weir", Check: f.Object, Level: "warning", Text: f.Text, Remedy: f.Remedy})
}

// examine adds a feature's findings about the running host.
func (d *Diagnosis) examine(ctx context.Context, r *kernel.Root, p feature.Declared) {
	x, ok := p.Value.(feature.Examiner)
	if !ok {
		return
	}
	findings, err := x.Examine(ctx, r)
	if err != nil && !errors.Is(err, kernel.ErrUnreadable) {
		d.Findings = append(d.Findings, Finding{Feature: p.Name, Check: "pins", Level: "warning", Text: err.Error()})
	}
	for _, f := range findings {
		d.Findings = append(d.Findings, newFinding(p.Name, f))
	}
}

func newFinding(name string, f feature.Finding) Finding {
	level := "warning"
	if f.Fails {
		level = "failure"
	}
	return Finding{Feature: name, Check: f.Object, Level: level, Text: f.Text, Remedy: f.Remedy}
}

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}
