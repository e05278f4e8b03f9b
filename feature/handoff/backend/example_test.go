// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/internal/strictyaml"
)

// TestExampleFiles checks that the agents accept the example files.
func TestExampleFiles(t *testing.T) {
	const dir = "../../../examples/handoff/"
	f, err := loadLB(dir + "lb.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s, err := loadBackend(dir + "backend.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if s.LB.Address != f.Listen || s.TLS.CA != f.TLS.CA {
		t.Errorf("the server's file does not fit the load balancer's: %+v, %s", s.LB, f.Listen)
	}
}

// loadLB reads the section lb of a file.
func loadLB(file string) (*lb.Config, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	c := struct {
		LB lb.Config `yaml:"lb"`
	}{lb.Config{Name: lb.Name}}
	if err := strictyaml.Decode(file, text, &c); err != nil {
		return nil, err
	}
	return &c.LB, errors.Join(c.LB.Validate()...)
}

// loadBackend reads the section handoff.backend of a file.
func loadBackend(file string) (*Config, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var c struct {
		Handoff struct {
			Backend Config `yaml:"backend"`
		} `yaml:"handoff"`
	}
	if err := strictyaml.Decode(file, text, &c); err != nil {
		return nil, err
	}
	return &c.Handoff.Backend, errors.Join(c.Handoff.Backend.Validate()...)
}

// TestExamplePair checks the example files of two load balancers, with the daemons of their configurations.
func TestExamplePair(t *testing.T) {
	const dir = "../../../examples/handoff/"
	f, err := loadLB(dir + "lb-a.yaml")
	if err != nil {
		t.Fatal(err)
	}
	s, err := loadBackend(dir + "backend-pair.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(s.LB.Names, []string{f.Name, f.Partner.Name}) || s.TLS.CA != f.TLS.CA {
		t.Errorf("the server's file does not fit the load balancers': %+v, %s, %+v", s.LB, f.Name, f.Partner)
	}
	if out, err := exec.Command("bird", "-p", "-c", dir+"bird.conf").CombinedOutput(); err != nil {
		t.Errorf("bird: %v: %s", err, out)
	}
	// Only the missing interfaces are acceptable errors.
	out, err := exec.Command("keepalived", "--config-test", "--use-file="+dir+"keepalived.conf").CombinedOutput()
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		if line != "" && !strings.Contains(line, "doesn't exist") && !strings.Contains(line, "Non-existent interface") {
			t.Errorf("keepalived: %v: %s", err, line)
		}
	}
}
