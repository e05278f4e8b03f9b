package tabletest

import (
	"testing"

	"github.com/cilium/ebpf"
)

func TestVerify(t *testing.T) {
	spec, _ := loadProbe()
	c, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats}})
	if err != nil {
		t.Fatal(err)
	}
	t.Log(c.Programs["probe_lookup"].VerifierLog)
}
