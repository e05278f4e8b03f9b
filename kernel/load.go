// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
)

// Collection is what was loaded of an object: its maps and programs by name.
type Collection = ebpf.Collection

// Load loads the programs named, and the maps they use, of a feature's object.
// share gives maps that exist already in place of new ones; those that the
// programs do not use are ignored.
func Load(spec *ebpf.CollectionSpec, programs []string, share map[string]*ebpf.Map) (*Collection, error) {
	liftMemlock()
	part := *spec // the library copies what it changes of programs and maps
	spec = &part
	spec.Programs, spec.Maps = maps.Clone(spec.Programs), maps.Clone(spec.Maps)
	keep := map[string]bool{}
	for _, p := range programs {
		if spec.Programs[p] == nil {
			return nil, fmt.Errorf("no program %s in the object", p)
		}
		keep[p] = true
	}
	for name := range spec.Programs {
		if !keep[name] {
			delete(spec.Programs, name)
		}
	}
	used := map[string]bool{}
	for _, p := range spec.Programs {
		for _, ins := range p.Instructions {
			if ref := ins.Reference(); ref != "" {
				used[ref] = true
			}
		}
	}
	for name := range spec.Maps {
		if !used[name] && !strings.HasPrefix(name, ".") {
			delete(spec.Maps, name)
		}
	}
	replace := map[string]*ebpf.Map{}
	for name, m := range share {
		if spec.Maps[name] != nil {
			replace[name] = m
		}
	}
	c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: replace})
	if err != nil {
		return nil, explainLoad("loading "+strings.Join(programs, ", "), err)
	}
	return c, nil
}

// liftMemlock comes before whatever creates maps and programs: kernels before
// 5.11 charge their memory to RLIMIT_MEMLOCK, which is small by default. Later
// ones do not, and lose nothing where it fails.
func liftMemlock() { _ = rlimit.RemoveMemlock() }

// explainLoad turns the kernel's refusal into a sentence with a remedy.
func explainLoad(what string, err error) error {
	var ve *ebpf.VerifierError
	switch {
	case scarce(err) != "": // also as the cause of an error of the verifier
		return fmt.Errorf("%s: %w: %s", what, err, scarce(err))
	case errors.As(err, &ve):
		return fmt.Errorf("%s: the kernel's verifier refused it: %w (weir doctor tells what this kernel can do)", what, err)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%s: %w: %s", what, err, rightsLacking())
	}
	return fmt.Errorf("%s: %w", what, err)
}

// ObjectHash is the SHA-256 of a BPF object, as meta keeps it.
func ObjectHash(elf []byte) [sha256.Size]byte { return sha256.Sum256(elf) }
