// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Kind defines the meaning of a failed claim.
type Kind string

const (
	Correctness Kind = "correctness" // loss, split or misdirection: a failure fails the run
	Performance Kind = "performance" // a ratio, a time: a failure is shown, and fails the run only with --strict
)

// Claim is one sentence, found true or false by the run.
type Claim struct {
	Claim  string  `json:"claim"`
	Kind   Kind    `json:"kind"`
	Metric string  `json:"metric"`
	Want   string  `json:"want"` // a comparison: "== 0", "< 100"
	Got    float64 `json:"got"`
	OK     bool    `json:"ok"`
}

// Result holds the findings of one run. Its JSON form is a contract, described in the documents of the lab.
type Result struct {
	Experiment string             `json:"experiment"`
	Size       string             `json:"size"`
	Kernel     string             `json:"kernel"`
	Seed       uint64             `json:"seed"`
	OK         bool               `json:"ok"`
	Metrics    map[string]float64 `json:"metrics"`
	Claims     []Claim            `json:"claims"`
	Skipped    []string           `json:"skipped,omitempty"` // peers that are not installed, never a pass
	Pictures   []string           `json:"-"`                 // files beside docs/RESULTS.md
	Notes      []string           `json:"notes,omitempty"`   // explanations for readers of a failed claim

	mu sync.Mutex
}

// NewResult returns an empty result of the named experiment on this kernel.
func NewResult(experiment string, size Size, seed uint64) *Result {
	var u unix.Utsname
	kernel := "unknown"
	if unix.Uname(&u) == nil {
		kernel = unix.ByteSliceToString(u.Release[:])
	}
	return &Result{Experiment: experiment, Size: size.String(), Kernel: kernel, Seed: seed, Metrics: map[string]float64{}}
}

// Set sets a metric.
func (r *Result) Set(metric string, v float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Metrics[metric] = v
}

// Note adds a line to explain a finding. After 20 lines the rest is only counted.
func (r *Result) Note(format string, a ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.Notes) < 20 {
		r.Notes = append(r.Notes, fmt.Sprintf(format, a...))
	}
}

// Skip records a missing peer and the skipped comparison.
func (r *Result) Skip(format string, a ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Skipped = append(r.Skipped, fmt.Sprintf(format, a...))
}

// Claim evaluates a metric. want is a comparison with a number: "== 0", ">= 128", "< 100". An unset metric
// fails the claim.
func (r *Result) Claim(kind Kind, claim, metric, want string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	got, measured := r.Metrics[metric]
	holds, err := compare(got, want)
	if err != nil {
		panic("lab: claim about " + metric + ": " + err.Error())
	}
	if !measured {
		got = -1
	}
	r.Claims = append(r.Claims, Claim{Claim: claim, Kind: kind, Metric: metric, Want: want, Got: got, OK: measured && holds})
}

// conclude sets OK if every claim holds.
func (r *Result) conclude() {
	r.OK = len(r.Claims) > 0
	for _, c := range r.Claims {
		r.OK = r.OK && c.OK
	}
}

// Failed reports whether the exit status is 1: a correctness claim fails, or with strict any claim. A
// result without claims proves nothing and counts as failed.
func (r *Result) Failed(strict bool) bool {
	for _, c := range r.Claims {
		if !c.OK && (strict || c.Kind == Correctness) {
			return true
		}
	}
	return len(r.Claims) == 0
}

func compare(got float64, want string) (bool, error) {
	op, number, found := strings.Cut(want, " ")
	n, err := strconv.ParseFloat(number, 64)
	if !found || err != nil {
		return false, fmt.Errorf("%q is not a comparison like \"< 100\"", want)
	}
	switch op {
	case "==":
		return got == n, nil
	case "<":
		return got < n, nil
	case "<=":
		return got <= n, nil
	case ">":
		return got > n, nil
	case ">=":
		return got >= n, nil
	}
	return false, fmt.Errorf("%q: want one of the comparisons ==, <, <=, > and >=", want)
}

// LeftoversMetric is a metric to count leftovers. Execute adds to it. An experiment with an interrupted run
// sets it to the leftovers of this run.
const LeftoversMetric = "leftovers"
