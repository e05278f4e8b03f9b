// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/host"
	"github.com/weir-project/weir/vm/objects"
)

// TestRows compares the rows with the jobs, the features and the packages.
func TestRows(t *testing.T) {
	used := map[string]int{}
	features := map[string]bool{}
	list, err := os.ReadFile("../packages")
	if err != nil {
		t.Fatal(err)
	}
	packages := parseList(string(list))
	for _, r := range rows {
		features[r.feature] = true
		for _, j := range r.jobs {
			used[j]++
		}
		for _, name := range r.packages {
			if !slices.ContainsFunc(packages, func(p Package) bool { return p.Package == name }) {
				t.Errorf("%s of row %s %s is not in vm/packages", name, r.feature, r.part)
			}
		}
	}
	for _, name := range others {
		used[name]++
	}
	for _, j := range objects.Jobs() {
		if used[j.Name] != 1 {
			t.Errorf("job %q is in %d rows, want 1", j.Name, used[j.Name])
		}
		delete(used, j.Name)
	}
	for name := range used {
		t.Errorf("no job %q", name)
	}
	for _, name := range host.Features() {
		if !features[name] {
			t.Errorf("feature %s has no row", name)
		}
		delete(features, name)
	}
	for name := range features {
		t.Errorf("no feature %q", name)
	}
}

// results returns the result of a kernel with every job loaded and every package passed.
func results(name string, list []Package) Kernel {
	k := Kernel{Series: name, Release: "6.1.0-5-cloud-amd64", Machine: "x86_64", Commit: "abc", Time: time.Unix(0, 0).UTC(),
		Doctor: &host.Diagnosis{Findings: []host.Finding{{Feature: "keeper", Check: "pidfd_open", Since: "5.3", Level: "ok"}, {Feature: "backend", Check: "TCP_REPAIR", Since: "4.19", Level: "ok"}}}}
	for _, j := range objects.Jobs() {
		k.Objects = append(k.Objects, objects.Result{Job: j.Name, Object: j.Object, Result: objects.Loaded})
	}
	for _, p := range list {
		p.Verdict, p.Counts = "ok", "3 passed, 0 failed, 0 skipped"
		k.Packages = append(k.Packages, p)
	}
	return k
}

func wholeTable(t *testing.T) (table, *Kernel) {
	list, err := os.ReadFile("../packages")
	if err != nil {
		t.Fatal(err)
	}
	all := table{packages: parseList(string(list))}
	for _, s := range series {
		all.kernels = append(all.kernels, results(s.name, all.packages))
	}
	return all, &all.kernels[1]
}

func TestComplete(t *testing.T) {
	all, _ := wholeTable(t)
	if err := all.complete(); err != nil {
		t.Error(err)
	}
	page := all.page()
	if err := check(page); err != nil {
		t.Errorf("%v\n%s", err, page)
	}
	for _, want := range []string{"| lb | load balancer | yes |", "| reroute | repairs at ingress, before routing | loads |", "| steer | `copy` | loads |", "| `kernel` | ok |"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page has no %q:\n%s", want, page)
		}
	}
	if err := check("# Another page\n"); err == nil {
		t.Error("check accepts a page without the tables")
	}
}

// Each incomplete result is named.
func TestIncomplete(t *testing.T) {
	job := func(k *Kernel, name string) *objects.Result {
		return &k.Objects[slices.IndexFunc(k.Objects, func(r objects.Result) bool { return r.Job == name })]
	}
	pkg := func(k *Kernel, name string) *Package {
		return &k.Packages[slices.IndexFunc(k.Packages, func(p Package) bool { return p.Package == name })]
	}
	for name, c := range map[string]struct {
		change func(all *table, k *Kernel)
		want   string
	}{
		"no result": {func(all *table, k *Kernel) { all.kernels = all.kernels[1:] }, "untested"},
		"left": {func(_ *table, k *Kernel) {
			*pkg(k, "feature/guard") = Package{Package: "feature/guard", Verdict: "left", Counts: "no time"}
		}, "`feature/guard` is untested"},
		"other flags":    {func(_ *table, k *Kernel) { pkg(k, "feature/steer").Flags = "-test.run=One" }, "`feature/steer` is untested"},
		"failed":         {func(_ *table, k *Kernel) { pkg(k, "kernel").Verdict = "FAIL" }, "`kernel` is FAIL"},
		"not loaded":     {func(_ *table, k *Kernel) { job(k, "lb").Result = objects.Failed }, "lb is FAIL"},
		"no object":      {func(_ *table, k *Kernel) { job(k, "lb").Job = "lb2" }, "lb is untested"},
		"no doctor":      {func(_ *table, k *Kernel) { k.Doctor = nil }, "keeper is untested"},
		"failed feature": {func(_ *table, k *Kernel) { pkg(k, "feature/handoff/lb").Verdict = "FAIL" }, "lb is FAIL"},
	} {
		t.Run(name, func(t *testing.T) {
			all, k := wholeTable(t)
			c.change(&all, k)
			if err := check(all.page()); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("check says %v, want %q", err, c.want)
			}
		})
	}
	all, k := wholeTable(t)
	k.Commit = "def"
	all.kernels = all.kernels[:2]
	if err := all.complete(); err == nil || !strings.Contains(err.Error(), "several commits: abc, def") || !strings.Contains(err.Error(), "no result of arm64") {
		t.Error(err)
	}
}

// A missing need is named with its first kernel, unless this kernel is newer.
func TestMissing(t *testing.T) {
	all, k := wholeTable(t)
	for i := range k.Objects {
		if k.Objects[i].Job == "lb" {
			k.Objects[i].Result = objects.Missing
			k.Objects[i].Missing = []objects.Missed{{Need: "old", Since: "5.9"}, {Need: "tcx links", Since: "6.6"}}
		}
		if k.Objects[i].Job == "guard sockets" {
			k.Objects[i].Result, k.Objects[i].Missing = objects.Missing, []objects.Missed{{Need: "cgroup2", Since: "4.5"}}
		}
	}
	k.Doctor.Findings[0].Level = "missing"
	page := all.page()
	for _, want := range []string{"| yes | no: Linux 6.6 (tcx links) |", "| yes | no: cgroup2 |", "| yes | no: pidfd_open |", "| 1 of 1 | 0 of 1 |"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page has no %q:\n%s", want, page)
		}
	}
	if err := check(page); err != nil {
		t.Errorf("a missing need is complete, but check says %v", err)
	}
}

func TestRecord(t *testing.T) {
	dir := t.TempDir()
	output := "insmod x failed\r\nweir-vm: machine aarch64\r\nweir-vm: begin doctor\r\n{\"kernel\":\"6.1\",\r\n\"findings\":[{\"feature\":\"lb\",\"check\":\"tcx links\",\"since\":\"6.6\",\"level\":\"note\"}]}\r\nweir-vm: end doctor\r\n" +
		"weir-vm: boot 6.1.0-5-cloud-arm64 3.21\nweir-vm: begin vm/objects\n\x16=== ATTR  TestLoads/lb object {\"job\":\"lb\",\"result\":\"loaded\"}\n\x16=== ATTR  TestLoads/lb color red\n"
	for name, text := range map[string]string{"output": output, "verdicts": "vm/objects\t-test.run=Loads\tok\t11.6\t3 passed, 0 failed, 1 skipped\nkernel\t\tleft\t0\tno time\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	k, err := record("arm64", "abc", dir, time.Unix(0, 0))
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprintf("%s %s %s %+v %+v %s", k.Release, k.Machine, k.Commit, k.Packages, k.Objects, k.Doctor.Findings[0].Check)
	want := "6.1.0-5-cloud-arm64 aarch64 abc [{Package:vm/objects Flags:-test.run=Loads Verdict:ok Seconds:12 Counts:3 passed, 0 failed, 1 skipped} {Package:kernel Flags: Verdict:left Seconds:0 Counts:no time}] [{Job:lb Object: Result:loaded Missing:[] Err:}] tcx links"
	if got != want {
		t.Errorf("recorded\n%s\nwant\n%s", got, want)
	}
}
