// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/vm/objects"
)

// Kernel is the result of one kernel.
type Kernel struct {
	Series   string           `json:"series"`
	Release  string           `json:"release"`
	Machine  string           `json:"machine"`
	Commit   string           `json:"commit"`
	Time     time.Time        `json:"time"`
	Doctor   *host.Diagnosis  `json:"doctor,omitempty"`
	Packages []Package        `json:"packages"`
	Objects  []objects.Result `json:"objects,omitempty"`
}

// Package is the verdict of a test package.
type Package struct {
	Package string `json:"package"`
	Flags   string `json:"flags,omitempty"`
	Verdict string `json:"verdict"` // ok, FAIL, left
	Seconds int    `json:"seconds"`
	Counts  string `json:"counts"` // as testlog prints them, or the reason of a verdict
}

// record reads a kernel's output and the verdicts of vm/run: DIR/output and DIR/verdicts, with a line of tab-separated
// fields for each package.
func record(series, commit, dir string, now time.Time) (Kernel, error) {
	k := Kernel{Series: series, Commit: commit, Time: now.UTC().Truncate(time.Second)}
	output, err := os.ReadFile(filepath.Join(dir, "output"))
	if err != nil {
		return k, err
	}
	if err := k.readOutput(string(output)); err != nil {
		return k, err
	}
	verdicts, err := os.ReadFile(filepath.Join(dir, "verdicts"))
	if err != nil {
		return k, err
	}
	for line := range strings.Lines(string(verdicts)) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(f) != 5 {
			return k, fmt.Errorf("verdict %q: want 5 fields", line)
		}
		seconds, err := strconv.ParseFloat(f[3], 64)
		if err != nil {
			return k, fmt.Errorf("verdict %q: %w", line, err)
		}
		k.Packages = append(k.Packages, Package{Package: f[0], Flags: f[1], Verdict: f[2], Seconds: int(seconds + 0.5), Counts: f[4]})
	}
	return k, nil
}

// readOutput reads the output of the guest's init, see vm/init.
func (k *Kernel) readOutput(output string) error {
	var doctor *strings.Builder
	for line := range strings.Lines(output) {
		line = strings.TrimRight(line, "\r\n")
		rest, framed := strings.CutPrefix(line, "weir-vm: ")
		word, rest, _ := strings.Cut(rest, " ")
		switch {
		case framed && word == "machine":
			k.Machine = rest
		case framed && word == "boot":
			k.Release, _, _ = strings.Cut(rest, " ")
		case line == "weir-vm: begin doctor":
			doctor = &strings.Builder{}
		case line == "weir-vm: end doctor" && doctor != nil:
			k.Doctor = &host.Diagnosis{}
			if err := json.Unmarshal([]byte(doctor.String()), k.Doctor); err != nil {
				return fmt.Errorf("weir doctor --json in Linux %s printed %.200q: %w", k.Series, doctor, err)
			}
			doctor = nil
		case doctor != nil:
			doctor.WriteString(line + "\n")
		default:
			if err := k.readAttribute(line); err != nil {
				return err
			}
		}
	}
	return nil
}

// readAttribute reads an attribute of a test: "=== ATTR  TEST KEY VALUE".
func (k *Kernel) readAttribute(line string) error {
	_, attribute, ok := strings.Cut(line, "=== ATTR  ")
	if !ok {
		return nil
	}
	f := strings.SplitN(attribute, " ", 3)
	if len(f) != 3 || f[1] != objects.Attribute {
		return nil
	}
	var r objects.Result
	if err := json.Unmarshal([]byte(f[2]), &r); err != nil {
		return fmt.Errorf("attribute of %s: %w", f[0], err)
	}
	k.Objects = append(k.Objects, r)
	return nil
}

// parseList reads a list of packages, such as vm/packages.
func parseList(text string) (out []Package) {
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		name, flags, _ := strings.Cut(line, " ")
		out = append(out, Package{Package: strings.TrimPrefix(name, "./"), Flags: flags})
	}
	return out
}
