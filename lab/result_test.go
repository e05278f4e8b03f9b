// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/json"
	"testing"
)

func TestClaims(t *testing.T) {
	for _, c := range []struct {
		got  float64
		want string
		ok   bool
	}{
		{0, "== 0", true}, {1, "== 0", false}, {128, ">= 128", true}, {127, ">= 128", false}, {99.9, "< 100", true},
		{100, "< 100", false}, {100, "<= 100", true}, {101, "<= 100", false}, {3, "> 3", false}, {3.1, "> 3", true},
	} {
		r := NewResult("x", Full, 1)
		r.Set("m", c.got)
		r.Claim(Correctness, "a claim", "m", c.want)
		if r.Claims[0].OK != c.ok {
			t.Errorf("%g %s: %v, want %v", c.got, c.want, r.Claims[0].OK, c.ok)
		}
	}
}

// An unmeasured metric fails every claim.
func TestClaimWithoutMeasurement(t *testing.T) {
	r := NewResult("x", Full, 1)
	r.Claim(Correctness, "nothing is lost", "lost", "== 0")
	r.conclude()
	if r.Claims[0].OK || r.OK || !r.Failed(false) {
		t.Errorf("%+v", r.Claims[0])
	}
}

// A malformed comparison is an error of the experiment.
func TestClaimMalformed(t *testing.T) {
	for _, want := range []string{"0", "==0", "= 0", "< many", ""} {
		if _, err := compare(0, want); err == nil {
			t.Errorf("%q is accepted as a comparison", want)
		}
	}
}

// Exit status: correctness claims always count, performance claims only with strict, and a run without
// claims fails.
func TestFailed(t *testing.T) {
	for _, c := range []struct {
		name                string
		correct, fast, none bool
		failed, strict      bool
	}{
		{name: "all hold", correct: true, fast: true},
		{name: "slow", correct: true, fast: false, strict: true},
		{name: "wrong", correct: false, fast: true, failed: true, strict: true},
		{name: "nothing claimed", none: true, failed: true, strict: true},
	} {
		r := NewResult("x", Full, 1)
		set := map[bool]float64{true: 0, false: 1}
		r.Set("lost", set[c.correct])
		r.Set("ms", set[c.fast])
		if !c.none {
			r.Claim(Correctness, "nothing is lost", "lost", "== 0")
			r.Claim(Performance, "it is fast", "ms", "< 1")
		}
		r.conclude()
		if r.Failed(false) != c.failed || r.Failed(true) != c.strict || r.OK != (c.correct && c.fast && !c.none) {
			t.Errorf("%s: failed %v, strict %v, ok %v", c.name, r.Failed(false), r.Failed(true), r.OK)
		}
	}
}

// CI and docs/RESULTS.md depend on this JSON object.
func TestResultJSON(t *testing.T) {
	r := NewResult("telemetry", Quick, 7)
	r.Kernel = "6.1"
	r.Set("split_devices", 0)
	r.Claim(Correctness, "no device is split", "split_devices", "== 0")
	r.conclude()
	got, err := json.Marshal(r)
	want := `{"experiment":"telemetry","size":"quick","kernel":"6.1","seed":7,"ok":true,"metrics":{"split_devices":0},` +
		`"claims":[{"claim":"no device is split","kind":"correctness","metric":"split_devices","want":"== 0","got":0,"ok":true}]}`
	if err != nil || string(got) != want {
		t.Errorf("%v\n got %s\nwant %s", err, got, want)
	}
}
