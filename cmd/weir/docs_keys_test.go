// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/backend"
	"github.com/weir-project/weir/feature/handoff/lb"
)

// The pages of the load balancer and its backends use no former key, because weir.yaml rejects former keys.
func TestDocsFormerKeys(t *testing.T) {
	var former []string
	for _, section := range []any{lb.Config{}, backend.Config{}, backend.Config{}.TLS} {
		fields := reflect.TypeOf(section)
		for i := range fields.NumField() {
			if name := fields.Field(i).Tag.Get("former"); name != "" {
				former = append(former, name)
			}
		}
	}
	if !slices.Contains(former, "park") || !slices.Contains(former, "signers") || !slices.Contains(former, "settle") {
		t.Fatalf("only %q are known as former keys", former)
	}
	span := regexp.MustCompile("`([a-z_]+)(: [^`]*)?`")
	for _, page := range []string{"../../docs/LB.md", "../../docs/BACKENDS.md"} {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for n, line := range strings.Split(string(text), "\n") {
			for _, m := range span.FindAllStringSubmatch(line, -1) {
				if slices.Contains(former, m[1]) {
					t.Errorf("%s:%d: %s is a former key", page, n+1, m[0])
				}
			}
		}
	}
}
