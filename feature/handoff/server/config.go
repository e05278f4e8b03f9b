// SPDX-License-Identifier: Apache-2.0

package server

import (
	"cmp"
	"errors"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/safefile"
	"github.com/weir-project/weir/internal/strictyaml"
)

// Config is the file of a server's agent: docs/HANDOFF-SERVERS.md tells each key.
type Config struct {
	strictyaml.Pos `yaml:"-"`
	Name           string        `yaml:"name"`      // in its certificate
	Number         int           `yaml:"number"`    // at the front end
	Address        netip.Addr    `yaml:"address"`   // where the front end sends this server's packets
	Weight         *int          `yaml:"weight"`    // of its share of new flows; absent: 1
	Listen         string        `yaml:"listen"`    // host:port that other servers' agents connect to
	Advertise      string        `yaml:"advertise"` // what they are told of it; absent: listen
	TLS            peer.Files    `yaml:"tls"`
	Front          FrontConfig   `yaml:"front"`
	Devices        []string      `yaml:"devices"`
	Services       []string      `yaml:"services"` // absent: all of the front end
	Keeper         string        `yaml:"keeper" path:"file"`
	Metrics        string        `yaml:"metrics"`
	Park           bool          `yaml:"park"` // packets of a session that leaves wait here, not at the front end
	Patience       time.Duration `yaml:"patience"`
	Limit          int           `yaml:"limit"`
}

// FrontConfig is where the front end's agent is.
type FrontConfig struct {
	Name    string   `yaml:"name"`  // in its certificate; absent: front
	Names   []string `yaml:"names"` // of those that the address may lead to, in place of name
	Address string   `yaml:"address"`
}

// mostNumber is the highest that a front end's flows have room for.
const mostNumber = 1<<10 - 1

// maxFile bounds a configuration, in bytes.
const maxFile = 16 << 20

// LoadConfig reads a file. Every mistake in it is an error with its place.
func LoadConfig(file string) (*Config, error) {
	name, b, err := safefile.Input(file, maxFile)
	if err != nil {
		return nil, err
	}
	return ParseConfig(name, b)
}

// ParseConfig reads the text of a file of that name.
func ParseConfig(file string, text []byte) (*Config, error) {
	c := &Config{}
	if err := strictyaml.Decode(file, text, c); err != nil {
		return nil, err
	}
	return c, errors.Join(c.validate()...)
}

func (c *Config) validate() (errs []error) {
	fail := func(format string, a ...any) { errs = append(errs, c.Errorf(format, a...)) }
	if c.Name == "" {
		fail("name: say what this server is called, as in its certificate")
	}
	if c.Number < 1 || c.Number > mostNumber {
		fail("number %d: each server has one of its own, from 1 to %d", c.Number, mostNumber)
	}
	if !c.Address.IsValid() {
		fail("address: say where the front end reaches this server, like 192.0.2.11")
	}
	if a := c.Address.Unmap(); c.Address.IsValid() && (a.IsUnspecified() || a.IsLoopback() || a.IsMulticast()) {
		fail("address %s: say where the front end reaches this server, like 192.0.2.11", a)
	}
	if c.Weight != nil && *c.Weight < 0 {
		fail("weight %d: take 0 or more", *c.Weight)
	}
	if host, _, err := net.SplitHostPort(cmp.Or(c.Advertise, c.Listen)); err != nil {
		fail("listen %q: say where other servers' agents connect to, like 192.0.2.11:7947", cmp.Or(c.Advertise, c.Listen))
	} else if a, err := netip.ParseAddr(host); host == "" || err == nil && a.IsUnspecified() {
		fail("listen %q is every address: say with advertise which of them others are to use", c.Listen)
	}
	if c.TLS.Certificate == "" || c.TLS.Key == "" || c.TLS.Signers == "" {
		fail("tls: name the files of certificate, key and signers: agents speak with nobody else")
	}
	if _, _, err := net.SplitHostPort(c.Front.Address); err != nil {
		fail("front: address %q: say where its agent listens, like 192.0.2.1:7946", c.Front.Address)
	}
	if c.Front.Name != "" && len(c.Front.Names) > 0 || slices.Contains(c.Front.Names, "") {
		fail("front: say either name, or names, like [front-a, front-b], for an address that may lead to each of them")
	}
	if len(c.Devices) == 0 {
		fail("devices: name the interfaces that the services' packets come by, and answers leave by")
	}
	for i, d := range c.Devices {
		if slices.Contains(c.Devices[:i], d) {
			fail("devices: %q is there twice: name each interface once", d)
		}
	}
	if c.Patience < 0 || c.Patience > 0 && c.Patience < 10*time.Millisecond {
		fail("patience %s: take 10 ms or more, and less than the front end's hold", c.Patience)
	}
	if c.Limit < 0 {
		fail("limit %d: take bytes", c.Limit)
	}
	return errs
}

// options are what the file says.
func (c *Config) options() (Options, error) {
	config, err := c.TLS.LoadFor(c.Name)
	if err != nil {
		return Options{}, err
	}
	weight := 1
	if c.Weight != nil {
		weight = *c.Weight
	}
	names := c.Front.Names
	if len(names) == 0 {
		names = []string{cmp.Or(c.Front.Name, "front")}
	}
	return Options{Name: c.Name, Number: move.Host(c.Number), TLS: config, Front: Remote{Name: names[0], Address: c.Front.Address}, FrontNames: names,
		Registration: peer.Registration{Address: c.Address, Weight: weight, Services: c.Services, Agent: cmp.Or(c.Advertise, c.Listen)},
		Serve:        c.Services, Devices: c.Devices, Keeper: c.Keeper, Park: c.Park, Patience: c.Patience, Limit: c.Limit,
		PatienceAt: c.At("patience")}, nil
}
